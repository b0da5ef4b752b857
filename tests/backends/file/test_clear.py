"""Clearing a file store: a clear that nobody waits for any more stops, and says that it has not happened."""

from __future__ import annotations

import pytest

from hicache_storage.objects import Call
from hicache_storage.spec import CancellationToken, StorageUnavailableError
from tests.backends.file.harness import chain

KEYS = chain("clear", 6)


def test_it_stops_once_the_call_is_cancelled(rig, monkeypatch):
    one, other = rig(), rig()
    for key in KEYS:
        assert all(one.put([key]))
    token, changes = CancellationToken(), one.store.changes
    call, remove = Call(cancellation=token), changes.remove

    def slow(shelf, bundle):
        removed = remove(shelf, bundle)
        # The deadline passes here, and the caller stores pages anew.
        token.cancel()
        return removed

    monkeypatch.setattr(changes, "remove", slow)
    namespaces = [one.storage.pools["kv"].namespace]
    with pytest.raises(TimeoutError, match="deadline of the clear"):
        one.storage.clear_namespaces(namespaces, call)
    left = [key for key in KEYS if other.hit([key])]
    assert len(left) == len(KEYS) - 1, "others know what is gone, and the rest was not touched"


def test_a_bundle_that_cannot_be_removed_is_told(rig, monkeypatch):
    one = rig()
    assert all(one.put(KEYS))

    def refuse(shelf, bundle):
        raise PermissionError(13, "Permission denied")

    changes = one.store.changes
    with monkeypatch.context() as patched:
        patched.setattr(changes, "remove", refuse)
        with pytest.raises(StorageUnavailableError, match="Permission denied"):
            one.storage.clear()
    one.storage.clear()
    assert not one.hit(KEYS)
