"""I/O requests for extents of neighbouring slots, and faults of single slots."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from hicache_backends.hf3fs import store as store_module
from hicache_backends.hf3fs.slots import engine as engine_module
from hicache_backends.hf3fs.slots.engine import IO_BYTES
from tests.backends.hf3fs.harness import chain, content


@pytest.fixture(params=["local disk", "elsewhere"])
def one(request, rig, monkeypatch):
    """A rig that reads straight to the host pool, and one that reads through bounce buffers."""
    mount = SimpleNamespace(is_local=request.param == "local disk")
    monkeypatch.setattr(store_module, "mount_of", lambda path: mount)
    return rig(components=(30_000, 35_536), pages=24, file_size="4MiB")


class Requests:
    """Sees each request and the slots that it touches, and fails those that touch one slot."""

    def __init__(self, monkeypatch, one, name):
        self.slots = list[list[int]]()
        self.bad = -1
        step, real = one.file.slot_bytes, getattr(engine_module, name)

        def stand_in(descriptor, buffers, offset):
            touched = list(range(offset // step, (offset + sum(map(len, buffers)) - 1) // step + 1))
            self.slots.append(touched)
            if self.bad in touched:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(engine_module, name, stand_in)


def test_neighbours_go_together(one, monkeypatch):
    reads, writes, keys = (
        Requests(monkeypatch, one, "read_into"),
        Requests(monkeypatch, one, "write_from"),
        chain("a", 20),
    )
    together = IO_BYTES // one.file.slot_bytes
    assert together == 7
    assert all(one.put(keys))
    one.expect(keys)
    for requests in (reads, writes):
        assert [len(slots) for slots in requests.slots] == [7, 7, 6]
        assert [slot for slots in requests.slots for slot in slots] == [
            one.slot(key) for key in keys
        ]


def test_strangers_do_not(one, monkeypatch):
    keys = chain("a", 12)
    assert all(one.put(keys))
    reads, asked = (
        Requests(monkeypatch, one, "read_into"),
        [keys[at] for at in (0, 1, 3, 4, 5, 2, 11, 10, 8)],
    )
    one.expect(asked)
    assert [len(slots) for slots in reads.slots] == [2, 3, 1, 1, 1, 1]


def test_a_request_that_fails_costs_the_pages_that_are_to_blame(one, monkeypatch):
    keys = chain("a", 10)
    assert all(one.put(keys))
    reads = Requests(monkeypatch, one, "read_into")
    reads.bad = one.slot(keys[3])
    assert [page is None for page in one.get(keys)] == [number == 3 for number in range(10)]
    assert one.storage.fault_count() == 1
    reads.bad = -1
    one.expect(keys)


def test_a_write_that_fails_costs_the_pages_that_are_to_blame(one, monkeypatch):
    writes, keys = Requests(monkeypatch, one, "write_from"), chain("a", 10)
    writes.bad = 3
    assert one.put(keys) == [number != 3 for number in range(10)]
    writes.bad = -1
    assert [page is None for page in one.get(keys)] == [number == 3 for number in range(10)]
    assert all(one.put(keys))
    one.expect(keys)


def test_a_file_that_ends_too_early_costs_what_is_missing(one):
    keys = chain("a", 10)
    assert all(one.put(keys))
    os.truncate(one.file.path, one.file.offset(one.slot(keys[6])) + 100)
    found = one.get(keys)
    assert found[:6] == [content(key, 0, one.page_bytes) for key in keys[:6]]
    assert found[6:] == [None] * 4


def test_what_lies_between_slots_is_nobodys(one):
    """The bytes from a page's envelope to the next slot may hold anything."""
    keys = chain("a", 8)
    assert all(one.put(keys))
    for key in keys:
        one.overwrite(one.slot(key), b"\xaa" * 100, one.page_bytes + 64)
    one.expect(keys)
