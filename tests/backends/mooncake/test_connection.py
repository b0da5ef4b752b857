"""Requests that are repeated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_backends.mooncake.client import connection, library
from hicache_backends.mooncake.client.connection import Connection


class Ranges:
    """Stands for the library's client: its reads of ranges answer codes in turn."""

    def __init__(self, *codes):
        self.codes, self.asked = list(codes), []

    def batch_get_into_multi_buffer_ranges(self, names, addresses, sizes, offsets):
        self.asked.append(names)
        return self.codes.pop(0)


@pytest.mark.parametrize(
    ("hung", "codes", "left"),
    [
        (False, [[100, library.TRANSFER_FAILED], [100, 100]], 0),
        (False, [[library.TRANSFER_FAILED] * 2] * 3, 1),
        (False, [[100, library.NOT_FOUND], [100, 100]], 1),
        # Each transfer that hangs takes a timeout.
        (True, [[100, library.TRANSFER_FAILED], [100, 100]], 1),
    ],
    ids=["arrives", "fails again", "is gone", "hangs"],
)
def test_a_transfer_that_fails_is_repeated_once(monkeypatch, hung, codes, left):
    store = Ranges(*codes)
    monkeypatch.setattr(connection, "set_up", lambda settings: store)
    monkeypatch.setattr(connection, "warm_up", lambda exist: None)
    monkeypatch.setattr(library, "has_hung", lambda began: hung)
    settings = SimpleNamespace(master=None)
    expected = codes[len(codes) - left - 1]
    answered = Connection(settings).read_ranges(["a", "b"], [[0], [0]], [[100], [100]])
    assert answered == expected
    assert len(store.codes) == left
