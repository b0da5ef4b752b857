"""The disk that drivers stand on: each named fault as a plain program sees it.

Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from hicache_conformance.injectors import disk as disk_module
from hicache_conformance.injectors.disk import DiskInjector, load_mfusepy, missing_for_disk
from hicache_conformance.model.case import Inconclusive
from hicache_conformance.model.fault_plan import MENU, FaultKind
from tests.conformance.fault_helpers import (
    CONTENT,
    MAX_SECONDS,
    background,
    bits_that_differ,
    find_fault,
    killed_after,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(bool(missing_for_disk()), reason=f"needs {missing_for_disk()}")


@pytest.fixture(scope="module")
def mounted():
    injector = DiskInjector()
    yield injector
    injector.close()


@pytest.fixture
def disk(mounted, request):
    """The injector, healed, and in `disk.file` a file with CONTENT."""
    mounted.heal()
    mounted.file = mounted.tmp / request.node.name.replace("/", "-")
    mounted.file.write_bytes(CONTENT)
    yield mounted
    mounted.heal()


@contextlib.contextmanager
def opened(path, flags=os.O_RDONLY):
    """A descriptor for a with statement; what closing says is of no interest."""
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _closed(file, flags, use=lambda descriptor: None):
    """Open a file, use its descriptor and close it."""
    with opened(file, flags) as descriptor:
        use(descriptor)


def _write(file):
    _closed(file, os.O_WRONLY, lambda descriptor: os.write(descriptor, b"x"))


def _create(file):
    os.close(os.open(f"{file}.new", os.O_CREAT | os.O_WRONLY))


USES = {
    "look": os.stat,
    "open": lambda file: _closed(file, os.O_RDONLY),
    "create": _create,
    "modify": lambda file: _closed(file, os.O_WRONLY),
    "read": lambda file: _closed(file, os.O_RDONLY, lambda descriptor: os.read(descriptor, 100)),
    "write": _write,
    "sync": lambda file: _closed(file, os.O_WRONLY, os.fsync),
    "name": lambda file: os.rename(file, f"{file}.renamed"),
}
ERRORS = [
    (fault.error, operation)
    for fault in MENU["disk"]
    if fault.kind is FaultKind.ERROR
    for operation in fault.operations or tuple(USES)
]


@pytest.mark.parametrize(("error", "operation"), list(dict.fromkeys(ERRORS)))
def test_an_error_reaches_the_program(disk, error, operation):
    find_fault(disk, FaultKind.ERROR, error=error, operations=(operation,))
    with pytest.raises(OSError, match=r"\[Errno") as raised:
        USES[operation](disk.file)
    assert raised.value.errno == getattr(errno, error)
    assert disk.injected_count() >= 1
    disk.heal()
    USES[operation](disk.file)


def test_an_error_strikes_where_it_was_told_to(disk):
    find_fault(disk, FaultKind.ERROR, error="EIO", operations=("write",), first=1, count=2)
    with opened(disk.file, os.O_WRONLY) as descriptor:
        answers = []
        for _ in range(5):
            try:
                answers.append(os.write(descriptor, b"abc"))
            except OSError as problem:
                answers.append(errno.errorcode[problem.errno])
    assert answers == [3, "EIO", "EIO", 3, 3]
    assert disk.injected_count() == 2


def _there(suffix):
    return lambda file: os.path.exists(f"{file}{suffix}")


APPLIED = {
    "rename": ("name", lambda file: os.rename(file, f"{file}.to"), _there(".to"), "ENOENT"),
    "link": ("name", lambda file: os.link(file, f"{file}.ln"), _there(".ln"), "EEXIST"),
    "mkdir": ("name", lambda file: os.mkdir(f"{file}.dir"), _there(".dir"), "EEXIST"),
    "unlink": ("remove", os.unlink, lambda file: not os.path.exists(file), "ENOENT"),
    "write": ("write", _write, lambda file: file.read_bytes()[:1] == b"x", "EIO"),
    "create": ("create", _create, _there(".new"), "EIO"),
}


@pytest.mark.parametrize(("operation", "change", "done", "error"), APPLIED.values(), ids=APPLIED)
def test_a_request_takes_effect_and_fails(disk, operation, change, done, error):
    # As a retransmitted request fails, and with an error of one's choice.
    find_fault(disk, FaultKind.APPLIED, operations=(operation,), count=1)
    with pytest.raises(OSError, match=r"\[Errno") as raised:
        change(disk.file)
    assert raised.value.errno == getattr(errno, error)
    assert done(disk.file)
    assert disk.injected_count() == 1
    (disk.tmp / "other").write_bytes(CONTENT)
    find_fault(disk, FaultKind.APPLIED, operations=(operation,), count=1, error="ETIMEDOUT")
    with pytest.raises(OSError, match=os.strerror(errno.ETIMEDOUT)):
        change(disk.tmp / "other")
    assert done(disk.tmp / "other")


def test_a_short_read_leaves_the_rest_out(disk):
    find_fault(disk, FaultKind.SHORT_READ, operations=("read",))
    with opened(disk.file) as descriptor:
        assert os.read(descriptor, len(CONTENT)) == CONTENT[: len(CONTENT) // 2]
    # Who reads on until there is no more does not get everything either.
    assert len(disk.file.read_bytes()) < len(CONTENT)


@pytest.mark.parametrize(
    ("kind", "told"), [(FaultKind.SHORT_WRITE, 500), (FaultKind.TORN_WRITE, 1000)]
)
def test_half_of_a_write_is_made_and_told_or_not(disk, kind, told):
    find_fault(disk, kind, operations=("write",))
    with opened(disk.file, os.O_WRONLY) as descriptor:
        assert os.write(descriptor, b"\xff" * 1000) == told
    assert (disk.backing / disk.file.name).read_bytes() == b"\xff" * 500 + CONTENT[500:]


@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_one_bit_is_read_wrong(disk, place):
    find_fault(disk, FaultKind.BIT_FLIP, operations=("read",), count=1, place=place)
    assert bits_that_differ(disk.file.read_bytes(), CONTENT) == 1
    assert disk.file.read_bytes() == CONTENT


def test_one_bit_is_written_wrong_and_stays_so(disk):
    find_fault(disk, FaultKind.BIT_FLIP, operations=("write",))
    with opened(disk.file, os.O_WRONLY) as descriptor:
        os.write(descriptor, CONTENT[::-1])
    disk.heal()
    assert bits_that_differ(disk.file.read_bytes(), CONTENT[::-1]) == 1


def test_a_read_gets_another_file_s_bytes(disk):
    draft, other = disk.tmp / "draft", disk.tmp / "elsewhere" / "page"
    other.parent.mkdir()
    draft.write_bytes(CONTENT[::-1])
    draft.rename(other)
    find_fault(disk, FaultKind.WRONG_KEY, operations=("read",))
    assert disk.file.read_bytes() == CONTENT[::-1]
    assert other.read_bytes() == CONTENT


def test_a_lost_descriptor_stays_lost_and_the_file_does_not(disk):
    with opened(disk.file) as before:
        # What the kernel remembers of it is of no help.
        assert os.pread(before, len(CONTENT), 0) == CONTENT
        find_fault(disk, FaultKind.LOST_DESCRIPTOR, operations=("read",), count=1)
        with opened(disk.file) as later:
            for descriptor in (later, before, later):
                with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                    os.read(descriptor, 10)
        disk.heal()
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.read(before, 10)
    assert disk.file.read_bytes() == CONTENT


def test_a_hang_ends_when_it_is_healed(disk):
    find_fault(disk, FaultKind.HANG, operations=("open",))
    thread, found = background(disk.file.read_bytes)
    eventually(lambda: disk.injected_count() == 1)
    thread.join(0.05)
    assert thread.is_alive()
    disk.heal()
    thread.join(MAX_SECONDS)
    assert found == [CONTENT]


def is_mounted(path):
    return str(path) in Path("/proc/self/mounts").read_text()


def test_a_closed_disk_is_gone_although_a_program_hangs_on_it():
    injector = DiskInjector()
    (injector.tmp / "file").write_bytes(b"x")
    find_fault(injector, FaultKind.HANG)
    hung, _ = background(lambda: os.path.exists(injector.tmp / "file"))
    eventually(lambda: injector.injected_count() > 0)
    injector.close()
    hung.join(MAX_SECONDS)
    assert not hung.is_alive()
    assert not is_mounted(injector.tmp.parent)
    assert not injector.tmp.parents[1].exists()


def test_a_disk_goes_with_a_suite_that_is_killed():
    source = "from hicache_conformance.injectors.disk import DiskInjector as Disk"
    tmp = Path(killed_after(f"{source}; disk = Disk(); print(disk.tmp, flush=True)"))
    eventually(lambda: not is_mounted(tmp.parent) and not tmp.parents[1].exists())


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("importlib.util.find_spec", r"mfusepy \(pip install"),
        ("shutil.which", r"fusermount3 \(package fuse3\)"),
        ("os.path.exists", "/dev/fuse"),
    ],
)
def test_without_fuse_the_disk_says_what_is_missing(monkeypatch, missing, words):
    monkeypatch.setattr(f"{disk_module.__name__}.{missing}", lambda _: None)
    with pytest.raises(Inconclusive, match=f"the injector 'disk' needs .*{words}"):
        DiskInjector()


def test_libfuse_3_is_chosen_and_another_is_named(monkeypatch):
    monkeypatch.setenv("FUSE_LIBRARY_PATH", "")
    mfusepy = load_mfusepy()
    assert "libfuse3" in os.environ["FUSE_LIBRARY_PATH"]
    monkeypatch.setattr(mfusepy, "fuse_version_major", 2)
    with pytest.raises(OSError, match=r"libfuse 3 is needed.*mfusepy has version 2\..*libfuse3"):
        load_mfusepy()
