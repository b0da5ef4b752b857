"""Clearing a file store: a clear stops at its deadline, and reports that it is not done."""

from __future__ import annotations

import os

import pytest

from hicache_storage.objects import Call
from hicache_storage.spec import CancellationToken, StorageUnavailableError
from tests.backends.file.harness import chain

KEYS = chain("clear", 24)


def test_it_stops_once_the_call_is_cancelled(rig, monkeypatch):
    one, other = rig(), rig()
    for key in KEYS:
        assert all(one.put([key]))
    token, unlink = CancellationToken(), os.unlink
    call = Call(cancellation=token)

    def slow(path):
        unlink(path)
        # The deadline passes here, and the caller stores pages anew.
        token.cancel()

    monkeypatch.setattr(os, "unlink", slow)
    namespaces = [one.storage.pools["kv"].namespace]
    with pytest.raises(TimeoutError, match="deadline"):
        one.storage.clear_namespaces(namespaces, call)
    left = [key for key in KEYS if other.hit([key])]
    # Those whose removal was announced together are gone, the rest was not touched.
    assert 0 < len(left) < len(KEYS)
    assert other.holds(left)


def test_a_bundle_that_cannot_be_removed_is_told(rig, monkeypatch):
    one = rig()
    assert all(one.put(KEYS))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(StorageUnavailableError, match="Permission denied"):
            one.storage.clear()
    one.storage.clear()
    assert not one.hit(KEYS)
