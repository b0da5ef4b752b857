"""The page that a slot holds, compared with the page that the map lists for it."""

from __future__ import annotations

import os

import msgspec
import pytest

from hicache_backends.hf3fs.slots.engine import is_damaged
from hicache_metadata_server.protocol import SlotState
from hicache_storage.objects import Call

A, B, ESCAPED = "a", "b", "~tilde"


def damaged(rig, page):
    return is_damaged(rig.store.engine, rig.file, page, Call(5))


@pytest.fixture
def stored(rig):
    """A rig with three pages, and what the map says of them; one key has to be escaped."""
    one = rig(file_size="1MiB")
    assert all(one.put([A, B, ESCAPED]))
    pages = one.store.metadata.inspect(one.file.scope, Call(5), slots=[0, 1, 2])
    assert {page.state for page in pages} == {SlotState.LIVE}
    assert not any(damaged(one, page) for page in pages)
    return one, pages


@pytest.mark.parametrize(
    "changed",
    [{"length": 64}, {"length": 10**6}, {"checksum": 1}, {"key": B}, {"slot": 1}],
    ids=str,
)
def test_what_the_map_says_is_compared_with_the_slot(stored, changed):
    one, pages = stored
    assert damaged(one, msgspec.structs.replace(pages[0], **changed))


def test_a_file_that_is_short_or_unreadable(stored):
    one, pages = stored
    os.truncate(one.file.path, 100)
    assert damaged(one, pages[1])
    os.unlink(one.file.path)
    os.mkdir(one.file.path)
    one.file.close()
    assert damaged(one, pages[0]) is None
