"""Opening, closing, options: nothing is left behind, and misuse raises a clear error."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

import pytest

from hicache_backends.file import reader, store
from hicache_backends.file.config import FileConfig
from hicache_backends.file.paths import ProcessId, current_process, has_exited
from hicache_backends.file.temp_files import TemporaryName
from hicache_backends.posix import files
from hicache_backends.posix.directories import Mount, mount_of
from hicache_storage.spec import (
    ConfigError,
    parse_config,
)
from tests.backends.file.harness import chain, failing, flip, raising
from tests.support.waiting import eventually


def open_files(path: Path = Path("/")) -> set[tuple[str, str]]:
    """The descriptors of files below a path; other files of this process may come and go."""
    found = set[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith(str(path)):
                found.add((number, name))
    return found


def test_faults_keep_no_file_open(rig, monkeypatch):
    monkeypatch.setattr(store, "OPEN_FILES", 0)
    a, keys = rig(), chain("a", 8)
    a.put(keys)
    before = open_files(a.path)
    with failing("preadv", errno.EIO):
        for _ in range(20):
            a.get(keys)
    assert open_files(a.path) == before


def test_open_files_are_bounded_and_closed_once_idle(rig, monkeypatch):
    monkeypatch.setattr(store, "OPEN_FILES", 5)
    a, keys = rig(), chain("a", 30)
    for key in keys:
        a.put([key])
    before = len(open_files(a.path))
    assert a.holds(keys)
    assert before < len(open_files(a.path)) <= before + 6
    monkeypatch.setattr(files, "IDLE_SECONDS", -1.0)

    def idle() -> bool:
        a.hit(keys)
        return len(open_files(a.path)) == before

    # On a stalled disk closing may wait: in another thread.
    eventually(idle)


def test_checksums_can_be_turned_off_and_that_shows(rig, monkeypatch):
    a, keys = rig(verify_checksums=False, components=(600_000,)), chain("a", 2)
    a.put(keys)
    flip(a.bundles()[0], 0)
    assert a.storage.get_stats().verifies_checksums is False
    with monkeypatch.context() as patch:
        # None is computed, either: they take a sixth of the time of a read of long pages.
        patch.setattr(reader, "running_checksum", None)
        assert a.get(keys)[0] is not None
    assert rig(components=(600_000,)).get(keys)[0] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "x", "capacity": "500"}, "a unit is missing"),
        ({"path": "x", "capacity": 500}, "a unit is missing"),
        ({"path": "~/x"}, "only a shell expands"),
        ({"path": "x", "capacity": 0}, "capacity must not be 0"),
        ({"path": "x", "min_free": "much"}, "min_free: 'much' is not a size"),
        ({"path": "x", "min_free": "5"}, "as in '5%'"),
        ({"path": "x", "min_free": "five%"}, "is no percentage"),
        ({"path": "x", "min_free": "nan%"}, "less than 100%"),
        ({"path": "x", "min_free": "100%"}, "less than 100%"),
        ({"path": "x", "threads": 0}, "threads"),
    ],
)
def test_a_wrong_option_is_told(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(FileConfig, options)


def test_a_process_is_told_from_one_that_has_its_number_now():
    me = current_process()
    assert not has_exited(me)
    assert has_exited(ProcessId(me.pid_scope, me.pid, me.started + 1))
    assert not has_exited(ProcessId("elsewher", me.pid, me.started + 1))
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # A zombie has a place in the process table and writes nothing any more.
    with open(f"/proc/{child}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    assert has_exited(ProcessId(me.pid_scope, child, started))
    os.waitpid(child, 0)


@pytest.fixture
def hidden_processes(monkeypatch):
    """A /proc with `hidepid=2`, and all other processes of another user."""
    me, real = os.getpid(), open

    def hide(path, *args, **kwargs):
        if (
            str(path).startswith("/proc/")
            and str(path).split("/")[2].isdigit()
            and str(me) not in str(path)
        ):
            raise FileNotFoundError(2, "hidden")
        return real(path, *args, **kwargs)

    def refuse(pid, signal):
        if not os.path.exists(f"/proc/{pid}"):
            raise ProcessLookupError(3, "no such process")
        raise PermissionError(1, "another user's")

    monkeypatch.setattr("builtins.open", hide)
    monkeypatch.setattr(os, "kill", refuse)


def test_a_process_that_cannot_be_seen_is_not_taken_for_dead(rig, hidden_processes):
    a, me = rig(), current_process()
    stranger = ProcessId(me.pid_scope, os.getppid(), 1)
    assert has_exited(stranger) is None
    assert has_exited(ProcessId(me.pid_scope, 2**22 + 1, 1)) is True
    assert has_exited(ProcessId(me.pid_scope, 2**70, 1)) is True
    path = Path(a.store.temp_files.path(TemporaryName(stranger, "aaaaaaaaaa", 0, 100)))
    path.write_bytes(b"x")
    assert a.store.temp_files.collect() == (100, 0)
    # Its PID may be another's by now: what is old is collected all the same.
    os.utime(path, (time.time() - 3700,) * 2)
    assert a.store.temp_files.collect() == (0, 1)


def test_the_file_system_under_a_path_is_known(tmp_path, monkeypatch):
    assert mount_of("/dev/shm") == Mount("tmpfs")
    assert mount_of("/proc/self").kind == "proc"
    assert mount_of(str(tmp_path)).is_local
    assert not Mount("nfs4").is_local
    assert not Mount("").is_local
    monkeypatch.setattr("builtins.open", raising(errno.ENOENT))
    assert mount_of(str(tmp_path)) == Mount("")


def test_a_mount_point_is_not_made(rig, tmp_path):
    a = rig(tmp_path / "not-mounted" / "store")
    assert "mount what belongs there" in a.storage.health().detail
    assert a.put(chain("a", 1)) == [False]
    assert not (tmp_path / "not-mounted").exists()
    (tmp_path / "not-mounted").mkdir()
    assert a.storage.health().ok
