"""Disks that take nothing more, full or read-only, under a minute of an engine's requests: each page
that is there is delivered, whatever is refused meanwhile.

Needs root and loop devices.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from hicache_storage import StorageOptions, create_storage
from tests.backends.file.harness import Rig, chain, identity
from tests.backends.hf3fs.conftest import SERVE
from tests.hostile.test_freeze import ext4, run
from tests.metadata_server.full_disks import SmallDisk, small_disk
from tests.support.metadata import Served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(300)]

SECONDS = float(os.environ.get("HICACHE_HOSTILE_SECONDS", "60"))
REQUESTS_A_SECOND = 10
COMPONENTS = (32 << 10, 32 << 10)
PAGES = 16
DRIVERS = ("file", "hf3fs")


def engine_on(name: str, path: Path, server: Served) -> Rig:
    """A storage with every layer at its defaults, the circuit breakers among them.

    `file` leaves nobody any room, so that it evicts nothing for a full disk.
    """
    driver = name.split()[0]
    options = {
        "file": {"min_free": 0},
        "hf3fs": {"file_size": "128MiB", "metadata_url": server.url},
    }[driver]
    storage = create_storage(
        driver,
        identity(model=name),
        {"path": str(path), **options},
        options=StorageOptions(deadline_seconds=10.0),
    )
    storage.open()
    return Rig(path, storage=storage, pages=PAGES, components=COMPONENTS)


def disks(stack: ExitStack, place: Path) -> Iterator[tuple[str, Path]]:
    for kind in ("ext4", "tmpfs"):
        for refusal in ("full", "read-only"):
            for driver in DRIVERS:
                directory = place / f"{kind}-{refusal}-{driver}"
                directory.mkdir()
                if kind == "ext4":
                    point = stack.enter_context(ext4(directory / "image", directory / "point"))
                else:
                    point = stack.enter_context(small_disk(directory, "256m")).path
                yield f"{driver} on {kind}, {refusal}", point


def test_a_disk_that_refuses_hides_no_page(tmp_path):
    """All disks at once: each engine waits for most of its time."""
    with ExitStack() as stack:
        server = stack.enter_context(Served(command=SERVE))
        engines = {}
        for name, point in disks(stack, tmp_path):
            engine = engine_on(name, point, server)
            assert engine.put(chain("old", 8)) == [True] * 8
            if name.endswith("full"):
                SmallDisk(point).fill()
            else:
                # While a file is open for writing, no mount becomes read-only.
                engine.storage.close()
                run("mount", "-o", "remount,ro", point)
                engine = engine_on(name, point, server)
            engines[name] = engine
            stack.callback(engine.storage.close)

        def requests(engine: Rig) -> tuple[int, int, int]:
            asked = hits = stored = 0
            old = chain("old", 8)
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                asked += 1
                hits += engine.hit(old) == len(old) and engine.holds(old)
                stored += sum(engine.put(chain(f"new {asked}", 4)))
                time.sleep(1 / REQUESTS_A_SECOND)
            return asked, hits, stored

        with ThreadPoolExecutor(len(engines)) as threads:
            counts = dict(zip(engines, threads.map(requests, engines.values()), strict=True))
        for name, (asked, hits, stored) in counts.items():
            stats = engines[name].storage.get_stats()
            print(f"  {name}: {hits} of {asked} hit, {stored} stored, {stats.faults} faults")
        assert all(hits == asked for asked, hits, _ in counts.values())
        # What is refused is no fault, and the engine's operator can see that it is refused.
        assert not any(engine.storage.get_stats().faults for engine in engines.values())
        assert not any(engine.storage.health().writable for engine in engines.values())
