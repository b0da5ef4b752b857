"""Count the files that four flows enter, and the hops between files: how far a reader has to go.

    python scripts/flows.py [--files] [CHECKOUT]

A file is entered when one of its functions is called; what runs while a module is imported does not
count. A hop is a call from one of the project's files into another one; other libraries in between
are passed through.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("", "backends", "conformance", "metadata_server")
HOOK = """
import atexit, os, pathlib, sys, threading

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
importing = threading.local()


def profile(frame, event, argument):
    code = frame.f_code
    if not recording[0] or event not in ("call", "return"):
        return
    if not code.co_filename.startswith(FOLDERS):
        return
    if code.co_name == "<module>":
        change = 1 if event == "call" else -1
        importing.depth = getattr(importing, "depth", 0) + change
    if event == "return" or not code.co_flags & FUNCTION or getattr(importing, "depth", 0):
        return
    files.add(code.co_filename)
    caller = frame.f_back
    while caller and not caller.f_code.co_filename.startswith(FOLDERS):
        caller = caller.f_back
    if caller and caller.f_code.co_filename != code.co_filename:
        hops[0] += 1


def begin():
    recording[0] = True


def end():
    recording[0] = False
    path = pathlib.Path(os.environ["FLOWS_OUT"], f"{os.getpid()}")
    path.write_text(chr(10).join([str(hops[0]), *sorted(files)]))


sys.flows_begin, sys.flows_end = begin, end
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
REQUESTS = """
import json, os, signal, sys, threading, time, urllib.request
from hicache_metadata_server.cli.main import app

SERVER = "http://127.0.0.1:18411"


def post(path, **scope):
    body = json.dumps({"scopes": [{"scope": "0:kv", **scope}]}).encode()
    request = urllib.request.Request(SERVER + path, body, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read() or b"{}")


def client():
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(SERVER + "/readyz").read()
                break
            except OSError:
                time.sleep(0.1)
        post("/v2/initialize", slots=8, slot_bytes=64)
        sys.flows_begin()
        leases = post("/v2/reserve", keys=["key"])["scopes"][0]["leases"]
        post("/v2/commit", leases=leases, lengths=[64], checksums=[1])
        sys.flows_end()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=client).start()
store = f"sqlite:///{os.environ['FLOWS_OUT']}/../metadata.db"
sys.argv[1:] = ["serve", "--port", "18411", "--store", store]
app()
"""
CASE = """
import sys
from hicache_storage.cli.main import main
sys.argv[1:] = ["conformance", "run", "file", "--profile", "smoke", "--case", "test_pages_read_back"]
main()
"""
FLOWS = {
    "the first set of a page with `file`": PAGE,
    "a prefix of the hybrid cache, from its match to the device": PREFIX,
    "a reserve and commit over HTTP, into SQLite": REQUESTS,
    "one conformance case, from the command line to its verdict": CASE,
}


def main() -> None:
    """Run the flows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, metavar="CHECKOUT")
    parser.add_argument("--files", action="store_true", help="name the files of each flow")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    print("| flow | files | hops |\n|---|---|---|")
    for name, code in FLOWS.items():
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
                # The processes of a case count from their start to their end.
                "FLOWS_ALL": "1" if code is CASE else "",
            }
            command = [sys.executable, "-W", "ignore", "-c", code]
            with Path(directory, "log").open("w") as log:
                subprocess.run(
                    command, env=environment, cwd=checkout, stdout=log, stderr=log, check=False
                )
            found = [place.read_text().splitlines() for place in out.iterdir()]
            if not found:
                sys.exit(f"{name}: {Path(directory, 'log').read_text()}")
        files = {file for lines in found for file in lines[1:]}
        print(f"| {name} | {len(files)} | {sum(int(lines[0]) for lines in found)} |")
        if options.files:
            print("\n".join(f"  {Path(file).relative_to(checkout)}" for file in sorted(files)))


if __name__ == "__main__":
    main()
