"""Whether an installed hicache-storage works: run by the Python of a clean environment, from
outside the checkout.

usage: PYTHON scripts/smoke.py VERSION
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).resolve().parents[1]
HICACHE = Path(sys.executable).with_name("hicache")
START_SECONDS = 30.0


def main() -> None:
    """Check the version, where the modules come from, the commands, and a round trip through two
    drivers."""
    wanted = sys.argv[1]
    assert version("hicache-storage") == wanted, (
        f"{version('hicache-storage')} is installed, not {wanted}"
    )
    for package in (
        "hicache_storage",
        "hicache_backends",
        "hicache_conformance",
        "hicache_metadata_server",
    ):
        module = __import__(package)
        place = Path(module.__path__[0]).resolve()
        assert not place.is_relative_to(CHECKOUT), f"{package} comes from the checkout: {place}"
        assert (place / "py.typed").exists(), f"{package} brings no types"
    assert {point.name for point in entry_points(group="hicache_storage.drivers")} >= {
        "file",
        "hf3fs",
        "mooncake",
    }
    assert run("--version").split() == ["hicache-storage", wanted]
    assert "hf3fs" in run("drivers")
    with tempfile.TemporaryDirectory() as folder:
        round_trip("file", {"path": f"{folder}/file", "capacity": "64MiB"})
        with serving(Path(folder)) as url:
            assert f"hicache-storage {wanted}" in run("metadata", "status", "--url", url)
            round_trip(
                "hf3fs", {"path": f"{folder}/hf3fs", "file_size": "64MiB", "metadata_url": url}
            )
    print(f"hicache-storage {wanted}: modules, commands, file and hf3fs drivers work")


def run(*arguments: str) -> str:
    """What a command of the installed command line prints."""
    return subprocess.run(
        [HICACHE, *arguments], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def round_trip(driver: str, config: dict[str, Any]) -> None:
    """Store two pages, find them, and read them back into another place, byte for byte."""
    import torch

    from hicache_storage import PoolTransfer, StorageIdentity, create_storage
    from hicache_storage.pools import AttentionGeometry, MHAHostPool

    pool = MHAHostPool(
        AttentionGeometry(layers=range(2), head_num=2, head_dim=16, dtype=torch.bfloat16),
        size=64 * 8,
        page_size=64,
    )
    identity = StorageIdentity(model="smoke", kv_dtype="bfloat16", page_size=64, layout=pool.layout)
    with create_storage(driver, identity, config) as storage:
        storage.register_mem_host_pool_v2(pool, "kv")
        written, read = pool.alloc(2 * 64), pool.alloc(2 * 64)
        pages = [torch.randn_like(pool.get_dummy_flat_data_page()) for _ in range(2)]
        for number, page in enumerate(pages):
            pool.set_from_flat_data_page(int(written[number * 64]), page)
        keys = ["page-0", "page-1"]
        assert storage.batch_set_v2([PoolTransfer("kv", written, keys=keys)]) == {
            "kv": [True, True]
        }
        assert storage.batch_exists_v2([*keys, "page-2"]).kv_hit_pages == 2
        assert storage.batch_get_v2([PoolTransfer("kv", read, keys=keys)]) == {"kv": [True, True]}
        for number, page in enumerate(pages):
            assert torch.equal(pool.get_data_page(int(read[number * 64])), page), (
                f"{driver} gave other bytes"
            )


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A metadata server on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = f"sqlite:///{folder}/metadata.db"
    server = subprocess.Popen(
        [HICACHE, "metadata", "serve", "--port", str(port), "--store", store],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"http://127.0.0.1:{port}/readyz"):
            assert server.poll() is None, "the metadata server has ended"
            assert time.monotonic() < deadline, "the metadata server does not answer"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        # uvicorn ends in order, and then by the signal itself.
        ended = server.wait(START_SECONDS)
        assert ended in (0, -signal.SIGTERM), f"the metadata server ended with {ended}"


def answers(url: str) -> bool:
    """Whether somebody says 200 there."""
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
