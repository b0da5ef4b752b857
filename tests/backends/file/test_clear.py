"""Clearing a file store: a clear stops at its deadline, and reports that it is not done."""

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
    token, publisher = CancellationToken(), one.store.publisher
    call, remove = Call(cancellation=token), publisher.remove

    def slow(bundle_set, bundle):
        removed = remove(bundle_set, bundle)
        # The deadline passes here, and the caller stores pages anew.
        token.cancel()
        return removed

    monkeypatch.setattr(publisher, "remove", slow)
    namespaces = [one.storage.pools["kv"].namespace]
    with pytest.raises(TimeoutError, match="deadline of the clear"):
        one.storage.clear_namespaces(namespaces, call)
    left = [key for key in KEYS if other.hit([key])]
    assert len(left) == len(KEYS) - 1, "others know what is gone, and the rest was not touched"


def test_a_bundle_that_cannot_be_removed_is_told(rig, monkeypatch):
    one = rig()
    assert all(one.put(KEYS))

    def refuse(bundle_set, bundle):
        raise PermissionError(13, "Permission denied")

    publisher = one.store.publisher
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "remove", refuse)
        with pytest.raises(StorageUnavailableError, match="Permission denied"):
            one.storage.clear()
    one.storage.clear()
    assert not one.hit(KEYS)
