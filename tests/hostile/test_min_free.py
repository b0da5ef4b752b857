"""Two engines on a disk that a stranger fills, again and again, for a minute.

Needs root and loop devices.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.backends.file.harness import Rig, chain
from tests.hostile.test_freeze import ext4
from tests.metadata_server.full_disks import PAGE, SmallDisk, small_disk
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(300)]

SECONDS = float(os.environ.get("HICACHE_HOSTILE_SECONDS", "60"))
COMPONENTS = (64 << 10,)
BACK_SECONDS = 5.0
MIN_FREE = 0.05
STORED_BYTES = 100 << 20
FILL_STEP = 64


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    if request.param == "ext4":
        with ext4(tmp_path / "image", tmp_path / "point") as point:
            yield SmallDisk(point)
    else:
        with small_disk(tmp_path, "256m") as made:
            yield made


def free_share(disk: SmallDisk) -> float:
    status = os.statvfs(disk.path)
    return status.f_bavail / status.f_blocks


def stored_bytes(disk: SmallDisk) -> int:
    return sum(int(bundle.name.split("-")[2], 16) for bundle in disk.path.rglob("*.bundle"))


def engine(path: Path, name: str) -> tuple[list[str], Counter[str]]:
    """Set chains and use them, as an engine does.

    Returns:
        The keys that were acknowledged, and what was counted.
    """
    rig, stored = Rig(path, components=COMPONENTS), list[str]()
    until = time.monotonic() + SECONDS
    for number in itertools.count():
        keys = chain(f"{name} {number}", 16)
        stored += [key for key, ok in zip(keys, rig.put(keys), strict=True) if ok]
        rig.hit(chain(f"{name} {number - 3}", 16))
        rig.versions(chain(f"{name} {max(0, number - 1)}", 16))
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    stats, faults = rig.stats(), rig.storage.get_stats().faults
    rig.storage.close()
    return stored, Counter(faults=faults + stats.pages_damaged, evicted=stats.pages_evicted)


def be_a_stranger(disk: SmallDisk, seconds: float) -> list[float]:
    """Fill the disk to the last byte once the engines have stored more than they promise to others;
    wait for room, give some back, and fill again.

    Returns:
        The seconds until the engines had left the room that they promise, for each time.
    """
    waits, until, file = list[float](), time.monotonic() + seconds, disk.path / "stranger"
    while time.monotonic() < until:
        if stored_bytes(disk) < STORED_BYTES:
            time.sleep(0.1)
            continue
        with file.open("ab", buffering=0) as filling, contextlib.suppress(OSError):
            while filling.write(bytes(FILL_STEP * PAGE)):
                pass
        filled = time.monotonic()
        eventually(lambda: free_share(disk) >= MIN_FREE, "no room", seconds=20)
        waits.append(time.monotonic() - filled)
        os.truncate(file, 20 << 20)
    return waits


def test_a_stranger_fills_the_disk(disk):
    store = disk.path / "store"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        engines = [processes.submit(engine, store, name) for name in ("one", "two")]
        waits = be_a_stranger(disk, SECONDS - 5)
        (one, counted), (two, more) = [each.result() for each in engines]
    reader = Rig(store, components=COMPONENTS, min_free=0)
    stored, total = [*one, *two], counted + more
    lost = len(stored) - sum(map(bool, reader.present(stored)))
    reader.storage.close()
    print(f"  {len(stored)} stored, {lost} gone, {total}; {len(waits)} times, {max(waits):.2f} s")
    assert max(waits) < BACK_SECONDS
    assert len(stored) > 1000
    assert total["faults"] == 0
    assert 0 < lost <= total["evicted"]
