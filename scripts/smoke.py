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
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).resolve().parents[1]
HICACHE = Path(sys.executable).with_name("hicache")


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
    assert "every byte verified" in run("demo", "--gib", "0.5")
    with tempfile.TemporaryDirectory() as folder:
        examine("file", f"path={folder}/file", "capacity=64MiB")
        with serving(Path(folder)) as url:
            assert f"hicache-storage {wanted}" in run("metadata", "status", "--url", url)
            examine("hf3fs", f"path={folder}/hf3fs", "file_size=64MiB", f"metadata_url={url}")
    print(f"hicache-storage {wanted}: modules, commands, file and hf3fs drivers work")


def run(*arguments: str) -> str:
    """Run a command of the installed command line, and return what it prints."""
    command = [HICACHE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def examine(driver: str, *options: str) -> None:
    """Let doctor store pages, find them, and read them back into others, byte for byte."""
    words = [word for option in options for word in ("-c", option)]
    # Long: other stages of CI use the machine at the same time.
    run("doctor", driver, "--deadline", "60", *words)


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
        run("metadata", "status", "--url", f"http://127.0.0.1:{port}", "--wait", "30")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        # uvicorn ends in order, and then by the signal itself.
        ended = server.wait(30)
        assert ended in (0, -signal.SIGTERM), f"the metadata server ended with {ended}"


if __name__ == "__main__":
    main()
