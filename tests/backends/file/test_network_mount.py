"""Requests on a network mount, counted on a pass-through file system."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_backends.file import store
from tests.backends.file.harness import Rig, chain
from tests.fuse.counting_fs import CountingMount

PAGES = 128
COMPONENTS = (32 << 10, 32 << 10)


@pytest.fixture
def mounts(tmp_path):
    """Mount points of one directory: each stands for a node of its own."""
    made = list[CountingMount]()

    def make(name: str = "node", **options: object) -> CountingMount:
        mount = CountingMount(tmp_path / "backing", tmp_path / name, **options)
        mount.__enter__()
        made.append(mount)
        return mount

    yield make
    for mount in made:
        mount.__exit__()


@pytest.fixture
def on(rig):
    return lambda mount, **options: rig(
        mount.point / "store", pages=PAGES, components=COMPONENTS, **options
    )


def requests(mount: CountingMount, before: dict[str, int]) -> int:
    return sum(mount.since(before).values())


def test_a_page_takes_less_than_one_request_each_way(mounts, on):
    mount = mounts()
    a = on(mount)
    for name in ("first", "second", "third"):
        keys = chain(name, PAGES)
        before = mount.counts()
        assert a.put(keys) == [True] * PAGES
        assert requests(mount, before) <= PAGES
        before = mount.counts()
        assert a.holds(keys)
        assert requests(mount, before) <= PAGES
    # Once its directories are known, what a batch of 8 MiB takes is this, and nothing else.
    before = mount.counts()
    a.put(chain("fourth", PAGES))
    written = mount.since(before)
    assert written["write"] == 9
    assert requests(mount, before) <= 24


def test_a_call_of_16_mib_is_one_bundle_there_and_two_on_a_local_disk(mounts, rig, monkeypatch):
    """A bundle costs a mount requests, and a local disk nearly nothing."""
    monkeypatch.setattr(store, "LOCAL_THREADS", 2)
    shape = {"pages": PAGES, "components": (64 << 10, 64 << 10)}
    there, here = rig(mounts().point / "store", **shape), rig(**shape)
    for a, bundles in ((there, 1), (here, 2)):
        assert a.put(chain("a", PAGES)) == [True] * PAGES
        assert len(a.bundles()) == bundles


def test_memory_answers_on_a_local_disk_alone(mounts, on, rig):
    """A mount must be asked what others have written: the requests of a vain attempt cost time."""
    for a, cached in ((on(mounts()), False), (rig(), True)):
        assert a.put(chain("a", 2)) == [True] * 2
        assert a.storage.caches_lookups is cached
        assert a.storage.caches_reads is cached


def test_what_is_known_is_told_with_one_request(mounts, on):
    mount = mounts()
    a, keys = on(mount), chain("a", PAGES)
    a.put(keys)
    assert a.hit(keys) == PAGES
    for _ in range(20):
        before = mount.counts()
        assert a.hit(keys) == PAGES
        assert mount.since(before) == {"getattr": 1}
    before = mount.counts()
    assert a.hit(chain("unknown", PAGES)) == 0
    assert mount.since(before) == {"getattr": 1}


def test_nodes_see_each_other_at_once_though_the_mounts_cache_attributes(mounts, on):
    one, two = mounts("one"), mounts("two")
    a, b = on(one), on(two)
    assert b.hit(["x"]) == a.hit(["x"]) == 0
    for turn in range(20):
        keys = chain(f"{turn}", 3)
        writer, reader = (a, b) if turn % 2 else (b, a)
        writer.put(keys)
        assert reader.hit(keys) == 3
        assert reader.holds(keys)
        writer.storage.delete(keys[:1])
        assert reader.present(keys) == [False, True, True]
    a.storage.clear()
    assert b.hit(chain("19", 3)[1:]) == 0


def test_what_another_node_has_written_takes_few_requests_to_learn(mounts, on):
    one, two = mounts("one"), mounts("two")
    a, b = on(one), on(two)
    for turn in range(5):
        a.put(chain(f"{turn}", PAGES))
    b.hit(["x"])
    a.put(chain("new", PAGES))
    before = two.counts()
    assert b.hit(chain("new", PAGES)) == PAGES
    assert requests(two, before) <= 12


def test_many_small_sets_cost_their_writer_one_more_request_and_readers_few(mounts, on):
    one, two, sets = mounts("one"), mounts("two"), 60
    a, b = on(one), on(two)
    a.put(chain("first", 1))
    assert b.hit(chain("first", 1)) == 1
    keys = chain("k", sets)
    before = one.counts()
    for key in keys:
        assert a.put([key]) == [True]
    made = one.since(before)
    # Two writes a bundle, and an append to the event log for every fifth set; 17 requests a set
    # without the log.
    assert made["write"] <= sets * 2.3
    assert sum(made.values()) <= sets * 18
    before = two.counts()
    assert b.hit(keys) == sets
    assert requests(two, before) <= 50


def test_a_file_server_that_dies_is_a_miss_and_its_return_is_noticed(mounts, on):
    mount = mounts()
    a, keys = on(mount), chain("a", 8)
    a.put(keys)
    assert a.holds(keys)
    mount.kill()
    assert a.get(keys) == [None] * 8
    assert a.hit(keys) == 0
    assert a.put(chain("b", 2)) == [False] * 2
    assert not a.storage.health().ok
    assert a.storage.get_stats().faults > 0
    mount.unmount(lazily=True)
    mount.mount()
    assert a.hit(keys) == 8
    assert a.holds(keys)
    assert a.put(chain("b", 2)) == [True] * 2


def test_a_mount_that_was_taken_away_and_came_back_is_noticed(mounts, on, monkeypatch):
    from hicache_backends.file import change_feed

    mount = mounts()
    a, keys = on(mount), chain("a", 8)
    a.put(keys)
    a.get(keys)
    mount.unmount(lazily=True)
    mount.mount()
    monkeypatch.setattr(change_feed, "REVALIDATION_SECONDS", -1.0)
    other: Rig = on(mount)
    other.put(chain("b", 2))
    assert a.hit(chain("b", 2)) == 2
    assert a.holds(keys)
    a.storage.delete(keys[:1])
    assert other.present(keys[:2]) == [False, True]
    for side in (a, other):
        side.storage.close()


def test_names_of_143_bytes_are_enough(mounts, on):
    """Encrypting file systems take no longer ones: sets failed for good after some events, and a
    clear removed pages that another storage went on to promise."""
    mount = mounts(max_name_bytes=143)
    a, b, keys = on(mount), on(mount), chain("a", 12)
    for number, key in enumerate(keys):
        assert a.put([key]) == [True]
        assert b.hit(keys) == number + 1
    assert a.storage.delete(keys[8:])
    assert b.hit(keys) == 8
    a.storage.clear()
    assert b.hit(keys) == 0
    assert b.put(keys) == [True] * 12
    assert a.holds(keys)
    assert not a.storage.get_stats().faults


def test_a_daemon_that_caches_names_is_warned_of(mounts, on, caplog):
    on(mounts()).storage.open()
    assert "mount, which caches names" not in caplog.text
    on(mounts("cached", subtype="sshfs")).storage.open()
    assert "cached/store is a fuse.sshfs mount, which caches names" in caplog.text


def refuse_statx(error: int) -> None:
    """Refuse the system call to this thread and those that it starts, as a container's profile
    does."""
    number = {"x86_64": 332, "aarch64": 291}[platform.machine()]
    program = b"".join(
        struct.pack("<HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the number of the system call
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x0005_0000 | error),
            (0x06, 0, 0, 0x7FFF_0000),  # allow
        )
    )
    buffer = ctypes.create_string_buffer(program)
    filters = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filters) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_a_container_that_refuses_statx_stores_and_finds(mounts, on, error, caplog):
    mount, keys = mounts(), chain("a", 8)

    def use() -> list[bool]:
        refuse_statx(error)
        a = on(mount)
        return [*a.put(keys), a.holds(keys), a.storage.health().ok]

    with ThreadPoolExecutor(1) as alone:
        assert alone.submit(use).result() == [True] * 10
    assert caplog.text.count("statx is refused") == 1


def test_reading_past_the_cache_takes_fewer_requests(mounts, on):
    mount = mounts()
    taken = []
    for direct_io in (None, False):
        a, keys = on(mount, direct_io=direct_io), chain(f"{direct_io}", PAGES)
        assert a.put(keys) == [True] * PAGES
        before = mount.counts()
        assert a.holds(keys)
        taken.append(mount.since(before)["read"])
    assert taken[0] <= 16
    assert 64 <= taken[1] <= 70
