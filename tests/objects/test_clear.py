"""LC-7: a clear that returns has happened, and one that has not happened raises; so of a delete."""

from __future__ import annotations

import pytest

from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError
from tests.objects.storing import stored
from tests.support.failing import failing


def test_a_store_that_cannot_be_reached_is_not_cleared(kit):
    storage, _pool = kit.memory_storage()
    storage.before = failing(OSError("no route"))
    for _ in range(2):
        # Also right after an attempt to connect has failed, where the data path does not try.
        with pytest.raises(StorageUnavailableError, match="no route"):
            storage.clear()


@pytest.mark.parametrize(
    ("operation", "error", "raised"),
    [
        ("clear", OSError("down"), StorageUnavailableError),
        ("clear", TimeoutError("late"), StorageTimeoutError),
        ("delete", OSError("down"), None),
    ],
)
def test_what_is_damaged_stays_hidden_when_it_cannot_be_removed(kit, operation, error, raised):
    storage, pool = kit.memory_storage()
    stored(storage, pool, ["a"], [0])
    storage.objects = {name: bytes(len(payload)) for name, payload in storage.objects.items()}
    assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [False]}
    storage.before = failing(error, operation)
    if raised is None:
        assert storage.delete(["a"]) == [False]
    else:
        with pytest.raises(raised, match=str(error)):
            storage.clear()
    assert storage.batch_exists_v2(["a"]).kv_hit_pages == 0
