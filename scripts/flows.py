"""Count the files that four flows enter, and the hops between files: how far a reader has to go.

    python scripts/flows.py [CHECKOUT]

A file is entered when one of its functions is called. A hop is a call from one of the project's
files into another one; other libraries in between are passed through.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("", "backends", "conformance", "metadata_server")
HOOK = """
import atexit, os, pathlib, signal, sys, threading

ROOT = os.environ["FLOWS_ROOT"]
FOLDERS = tuple(
    f"{ROOT}/{folder}/"
    for folder in (
        "hicache_storage",
        "backends/hicache_backends",
        "conformance/hicache_conformance",
        "metadata_server/hicache_metadata_server",
    )
)
FUNCTION = 1  # CO_OPTIMIZED: neither a module nor the body of a class
files, hops, recording = set(), [0], [False]


def profile(frame, event, argument):
    if not recording[0] or event != "call":
        return
    code = frame.f_code
    if not code.co_flags & FUNCTION or not code.co_filename.startswith(FOLDERS):
        return
    files.add(code.co_filename)
    caller = frame.f_back
    while caller and not caller.f_code.co_filename.startswith(FOLDERS):
        caller = caller.f_back
    if caller and caller.f_code.co_filename != code.co_filename:
        hops[0] += 1


def begin(*_):
    recording[0] = True


def end(*_):
    recording[0] = False
    path = pathlib.Path(os.environ["FLOWS_OUT"], f"{os.getpid()}")
    path.write_text(chr(10).join([str(hops[0]), *sorted(files)]))


sys.flows_begin, sys.flows_end = begin, end
signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
if os.environ.get("FLOWS_ALL"):
    begin()
    atexit.register(end)
threading.setprofile(profile)
sys.setprofile(profile)
"""
PAGE = """
import sys, tempfile
import torch
from hicache_storage import PoolName, PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool

identity = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=16, layout="page_first")
shape = AttentionGeometry(layers=range(2), head_num=2, head_dim=8, dtype=torch.bfloat16)
pool = PagedHostPool(shape, size=64, page_size=16)
with tempfile.TemporaryDirectory() as path:
    storage = create_storage("file", identity, {"path": path})
    storage.register_mem_host_pool_v2(pool, "kv")
    transfer = PoolTransfer(PoolName.KV, torch.arange(16), keys=["key"])
    sys.flows_begin()
    assert storage.batch_set_v2([transfer])[PoolName.KV] == [True]
    sys.flows_end()
    storage.close()
"""
PREFIX = """
import sys
import torch
from hicache_storage.hybrid import AttentionGeometry, MambaGeometry, StackConfig, build_hybrid_stack

attention = AttentionGeometry(layers=(1,), head_num=1, head_dim=8, dtype=torch.bfloat16)
mamba = MambaGeometry(
    layers=(0,),
    temporal_shape=(2, 2),
    conv_shapes=((2, 2),),
    temporal_dtype=torch.float32,
    conv_dtype=torch.bfloat16,
)
sizes = dict(page_size=16, checkpoint_interval=64, device_tokens=128, host_tokens=128)
states = dict(device_states=4, host_states=4, device="cpu")
config = StackConfig(attention=attention, mamba=mamba, **sizes, **states)
with build_hybrid_stack(config) as stack:
    cache, tokens = stack.cache, list(range(64))
    cache.insert(tokens, cache.alloc_kv(64), {64: int(cache.alloc_state())})
    assert stack.drain(60)
    cache.evict(64, 1)
    sys.flows_begin()
    lock = cache.lock(cache.match(tokens))
    assert cache.load(lock) is not None
    cache.start_loading().synchronize()
    sys.flows_end()
"""
SERVE = """
import sys
sys.argv[1:] = ["serve", "--port", sys.argv[1]]
try:
    from hicache_metadata_server.cli.main import app
except ImportError:
    from hicache_metadata_server.cli import app
app()
"""
CASE = """
import sys
from hicache_storage.cli.main import main
sys.argv[1:] = ["conformance", "run", "file", "--profile", "smoke", "--case", "test_pages_read_back"]
main()
"""
PORT = 18411
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("reserve", {"scopes": [{"scope": "0:kv", "keys": ["key"]}]}),
    ("commit", {"scopes": [{"scope": "0:kv", "leases": [0], "lengths": [64], "checksums": [1]}]}),
)


def main() -> None:
    """Run the flows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    checkout = parser.parse_args().checkout.resolve()
    print("| flow | files | hops |\n|---|---|---|")
    for name, flow in (
        ("the first set of a page with `file`", partial(run_code, PAGE)),
        ("a prefix of the hybrid cache, from its match to the device", partial(run_code, PREFIX)),
        ("a reserve and commit over HTTP", reserve_and_commit),
        ("one conformance case, from the command line to its verdict", conformance_case),
    ):
        with tempfile.TemporaryDirectory() as directory:
            hook, out = Path(directory, "hook"), Path(directory, "out")
            hook.mkdir()
            out.mkdir()
            (hook / "sitecustomize.py").write_text(HOOK)
            path = [str(hook), *(str(checkout / package) for package in PACKAGES)]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "FLOWS_ROOT": str(checkout),
                "FLOWS_OUT": str(out),
            }
            flow(environment)
            found = [place.read_text().splitlines() for place in out.iterdir()]
        files = {file for lines in found for file in lines[1:]}
        print(f"| {name} | {len(files)} | {sum(int(lines[0]) for lines in found)} |")


def run_code(code: str, environment: dict[str, str]) -> None:
    """Run code that says itself where its flow begins and ends."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd=environment["FLOWS_ROOT"],
        check=True,
    )


def reserve_and_commit(environment: dict[str, str]) -> None:
    """Send a reserve and a commit to a server, which records them alone."""
    command = [sys.executable, "-W", "ignore", "-c", SERVE, str(PORT)]
    server = subprocess.Popen(
        command, env=environment, cwd=environment["FLOWS_ROOT"], stderr=subprocess.DEVNULL
    )
    try:
        _await(server)
        geometry = {"scope": "0:kv", "slots": 8, "slot_bytes": 64}
        _post("initialize", {"scopes": [geometry]})
        server.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        leases = _post(*REQUESTS[0])
        name, commit = REQUESTS[1]
        commit["scopes"][0]["leases"] = leases["scopes"][0]["leases"]
        _post(name, commit)
        server.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
    finally:
        server.terminate()
        server.wait()


def conformance_case(environment: dict[str, str]) -> None:
    """Run a case, counting in every process that ends in order."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CASE],
        env={**environment, "FLOWS_ALL": "1"},
        cwd=environment["FLOWS_ROOT"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _await(server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server has not started")


def _post(name: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v2/{name}", json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    if response.status >= 400:
        raise RuntimeError(f"{name}: {response.status} {content.decode()}")
    return dict(json.loads(content)) if content else {}


if __name__ == "__main__":
    main()
