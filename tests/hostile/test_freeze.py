"""A local disk that really stalls: ext4 under `fsfreeze`, and ext4 on a device that answers nothing
any more.

Needs root and loop devices. Every stall is ended by a process of its own, should this one die.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from hicache_storage import HiCacheError, StorageOptions, create_storage
from tests.backends.file.harness import Rig, chain, identity
from tests.fuse.counting_fs import CountingMount

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(200)]

DEADLINE_SECONDS = 2.0
LATEST_SECONDS = DEADLINE_SECONDS + 1.0
MAX_STALL_SECONDS = 60
COMPONENTS = (32 << 10, 32 << 10)
PAGES = 64


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=60, capture_output=True)


@contextlib.contextmanager
def ext4(image: Path, point: Path):
    """A file system of its own in a file."""
    if os.geteuid():
        pytest.fail("mounting a file system takes root")
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
    point.mkdir()
    run("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        # Threads that were left behind may have files open for another moment.
        until = time.monotonic() + 20
        while (
            subprocess.run(["umount", str(point)], check=False, capture_output=True).returncode
            and time.monotonic() < until
        ):
            time.sleep(0.1)


@contextlib.contextmanager
def stalled(stop: list[object], go_on: list[object]):
    """Stall a disk for a while."""
    line = f"sleep {MAX_STALL_SECONDS}; {' '.join(map(str, go_on))}"
    watchdog = subprocess.Popen(["sh", "-c", line], start_new_session=True)
    run(*stop)
    try:
        yield
    finally:
        run(*go_on)
        os.killpg(watchdog.pid, signal.SIGKILL)
        watchdog.wait(10)


def engine_on(path: Path) -> Rig:
    """A storage as an engine gets it."""
    storage = create_storage(
        "file",
        identity(),
        {"path": str(path), "capacity": "100MiB"},
        options=StorageOptions(deadline_seconds=DEADLINE_SECONDS, breaker_threshold=0),
    )
    storage.open()
    return Rig(path, storage=storage, pages=2 * PAGES, components=COMPONENTS)


def timed(name, ask):
    """Make a call that has to end within its deadline and a second."""
    started = time.monotonic()
    try:
        answer = ask()
    except HiCacheError as error:
        answer = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    print(f"  {name}: {seconds:.3f} s, {answer}")
    assert seconds <= LATEST_SECONDS, f"{name} took {seconds:.1f} s"
    return answer


def forget_cached(path: Path) -> None:
    """Take all bundles out of the page cache."""
    for bundle in path.rglob("*.bundle"):
        descriptor = os.open(bundle, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def make_all_calls(engine, known, cold):
    """Every call, on a disk that stalls."""
    assert timed("exists", lambda: engine.hit(known)) == PAGES
    timed("get, in the page cache", lambda: engine.versions(known).count(0))
    timed("get, on the disk", lambda: engine.versions(cold).count(0))
    assert timed("set", lambda: sum(engine.put(chain("new", PAGES)))) == 0
    timed("exists, after a set that hangs", lambda: engine.hit(known))
    timed("delete", lambda: engine.storage.delete(known[:1]))
    timed("clear", engine.storage.clear)
    timed("health", engine.storage.health)
    timed("close", engine.storage.close)


def stored(path: Path) -> tuple[Rig, list[str], list[str]]:
    """An engine and two chains of pages that it has stored."""
    engine, known, cold = engine_on(path), chain("known", PAGES), chain("cold", PAGES)
    assert engine.put(known) == engine.put(cold) == [True] * PAGES
    return engine, known, cold


def test_calls_end_in_time_while_ext4_is_frozen(tmp_path):
    with ext4(tmp_path / "image", tmp_path / "mount") as mount:
        path = mount / "store"
        engine, known, cold = stored(path)
        forget_cached(path)
        assert engine.holds(known)
        assert engine.hit(known) == PAGES
        print(f"\next4 under fsfreeze, deadline {DEADLINE_SECONDS} s")
        with stalled(["fsfreeze", "-f", mount], ["fsfreeze", "-u", mount]):
            make_all_calls(engine, known, cold)
        after_the_stall(path, cold)


def test_calls_end_in_time_while_the_device_below_ext4_answers_nothing(tmp_path):
    with (
        CountingMount(tmp_path / "backing", tmp_path / "fuse") as fuse,
        ext4(fuse.point / "image", tmp_path / "mount") as mount,
    ):
        path = mount / "store"
        engine, known, cold = stored(path)
        forget_cached(path)
        # What the loop device has read from its file is cached too.
        run("sh", "-c", "sync; echo 1 > /proc/sys/vm/drop_caches")
        assert engine.holds(known)
        assert engine.holds(known)
        assert engine.hit(known) == PAGES
        server = fuse._processes[-1].pid
        print(f"\next4 on a device that answers nothing, deadline {DEADLINE_SECONDS} s")
        with stalled(["kill", "-STOP", server], ["kill", "-CONT", server]):
            assert timed("get, on the disk", lambda: engine.versions(cold).count(0)) == 0
            make_all_calls(engine, known, cold)
            engine.pool.memory[:] = b"\x77" * len(engine.pool.memory)
        after_the_stall(path, cold)
        assert set(engine.pool.memory) == {0x77}


def after_the_stall(path, cold):
    """What was acknowledged is there, unless the `clear` that was given up has come through."""
    engine = engine_on(path)
    until = time.monotonic() + 30
    # A clear that had been given up may be about to go on.
    while 0 < engine.hit(cold) < PAGES and time.monotonic() < until:
        time.sleep(0.1)
    print(f"  afterwards: {engine.versions(cold).count(0)} of {PAGES} pages")
    assert engine.put(chain("after", PAGES)) == [True] * PAGES
    assert engine.holds(chain("after", PAGES))
    engine.storage.close()
