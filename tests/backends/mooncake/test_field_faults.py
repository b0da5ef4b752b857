"""Faults that a driver for Mooncake was found to have, on a real master (docs/mooncake.md lists
them)."""

from __future__ import annotations

import ctypes

import pytest

from hicache_backends.mooncake.client import library
from tests.backends.file.harness import chain, content, interrupted


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def direct(request):
    return request.param


@pytest.fixture
def stranger(cluster):
    """The library itself, for objects that no driver of ours would store."""
    store = library.new_store()
    address = cluster.options["master_server_address"]
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
    yield store
    store.close()


def replace(stranger, name, data):
    """Put other bytes in the place of an object."""
    stranger.batch_remove([name], True)
    buffer = bytearray(data)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    copies = library.replicate_config(1)
    assert stranger.batch_put_from_multi_buffers([name], [[address]], [[len(buffer)]], copies) == [
        0
    ]


@pytest.mark.parametrize("wrong", ["half", "longer", "empty envelope", "other bytes"])
def test_an_object_that_is_no_page(rig, stranger, direct, wrong):
    """It is counted as damaged once, is gone for everybody, and the next set repairs it."""
    one, other = rig(direct=direct), rig()
    keys = chain(f"wrong {wrong} {direct}", 3)
    assert one.put(keys) == [True] * 3
    page = content(keys[1], 0, one.page_bytes)
    data = {
        "half": page[: one.page_bytes // 2],
        "longer": page + bytes(100),
        "empty envelope": page + bytes(64),
        "other bytes": bytes(one.page_bytes + 64),
    }[wrong]
    replace(stranger, one.name(keys[1]), data)
    found = one.get(keys)
    assert found[1] is None
    assert [found[0], found[2]] == [
        content(keys[0], 0, one.page_bytes),
        content(keys[2], 0, one.page_bytes),
    ]
    assert one.stats().pages_damaged == 1
    assert one.hit(keys) == other.hit(keys) == 1
    assert one.put(keys) == [True] * 3
    for each in (one, other):
        each.expect(keys)
    assert one.stats().pages_damaged == 1


def test_one_object_asked_for_twice(rig, direct):
    """The library fills one destination for a name; both are delivered all the same."""
    one = rig(direct=direct)
    [key, other] = chain(f"twice {direct}", 2)
    assert one.put([key, other, key]) == [True] * 3
    wanted = [content(k, 0, one.page_bytes) for k in (key, other, key)]
    assert one.get([key, other, key]) == wanted


@pytest.mark.parametrize("apart", [False, True], ids=["one client", "two clients"])
def test_what_another_has_repaired_is_not_removed(rig, stranger, apart):
    """Its set is refused while the damage is about to be removed, or its page stays."""
    one, other = rig(), rig(local_buffer_size="32MiB") if apart else rig()
    [key] = chain(f"repaired meanwhile {apart}", 1)
    one.put([key])
    replace(stranger, one.name(key), bytes(one.page_bytes + 64))
    answers = list[bool]()
    other.storage.open()
    assert (other.connection is not one.connection) == apart

    def repair():
        assert other.get([key]) == [None]
        answers.extend(other.put([key]))

    with interrupted(one.connection, "remove", repair):
        assert one.get([key]) == [None]
    assert len(answers) == 1
    assert other.get([key]) == [content(key, 0, one.page_bytes) if answers[0] else None]
    # Nothing keeps the next one from storing it.
    assert one.put([key]) == [True]
    other.expect([key])


def test_a_key_that_somebody_else_is_writing(rig, stranger):
    """It is not said to be stored while it is not, and it is as soon as the other's is."""
    one = rig(wait_seconds=0.1)
    [key] = chain("busy", 1)
    name = one.name(key)
    assert stranger.batch_put_session_start(
        [name], [one.page_bytes + 64], library.replicate_config(1)
    ) == [0]
    assert one.put([key]) == [False]
    assert one.hit([key]) == 0
    stranger.batch_put_session_revoke([name])
    assert one.put([key]) == [True]
    one.expect([key])
