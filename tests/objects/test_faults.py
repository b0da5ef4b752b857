"""`ObjectStorage` turns faults of a driver into misses; opening and closing."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from hicache_storage.spec import Health, StorageRefusedError, StorageUnavailableError
from tests.objects.storing import stored
from tests.support.failing import failing
from tests.support.waiting import eventually

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class TestFaults:
    """FT-1 and FT-7, beside the suite's `FaultCases`."""

    @pytest.mark.parametrize(
        "error",
        [
            *(OSError(number, os.strerror(number)) for number in NOT_WRITABLE),
            StorageRefusedError("over its quota"),
        ],
        ids=str,
    )
    def test_a_store_that_refuses_is_no_fault(self, kit, error, caplog):
        """A full disk counted as one, opened the breaker, and `health()` knew nothing of it."""
        storage, pool = kit.memory_storage()
        stored(storage, pool, ["a"], [0])
        storage.before = failing(error, "write", "delete", "clear")
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert storage.batch_set_v2([pool.transfer("kv", ["b"], [1])]) == {"kv": [False]}
        assert storage.delete(["a"]) == [False]
        with pytest.raises(StorageRefusedError):
            storage.clear()
        assert storage.fault_count() == 0
        assert storage.health() == Health(
            ok=True, detail=f"sets are refused: {error}", writable=False
        )
        assert caplog.text.count("sets are refused") == 1

    def test_permission_that_a_read_lacks_is_a_fault(self, kit):
        storage, pool = kit.memory_storage()
        stored(storage, pool, ["a"], [0])
        storage.before = failing(PermissionError(13, "Permission denied"), "read")
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [False]}
        assert storage.fault_count() == 1
        assert storage.health().writable

    def test_reads_of_nothing_do_not_end_the_episode_of_reads(self, kit, caplog):
        """A driver that knows that a page is not there does not touch what fails."""
        storage, pool = kit.memory_storage()
        stored(storage, pool, ["a"], [0])
        real = storage.read_objects

        def fail(batches, call):
            if any(read.key == "a" for batch in batches for read in batch.reads):
                raise OSError(5, "I/O error")
            return real(batches, call)

        storage.read_objects = fail
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [False]}
                assert storage.batch_get_v2([pool.transfer("kv", ["nowhere"], [1])]) == {
                    "kv": [False]
                }
            assert caplog.text.count("answering misses") == 1
            storage.read_objects = real
            assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [True]}
            assert caplog.text.count("serving again") == 1

    def test_an_answer_of_the_wrong_length(self, kit):
        storage, _pool = kit.memory_storage()
        storage.objects_exist = lambda batches, call: [[True]]
        assert storage.batch_exists_v2(["a", "b"]).kv_hit_pages == 0
        assert storage.get_stats().faults == 1

    def test_connecting_fails_and_is_tried_again(self, kit, monkeypatch):
        storage, pool = kit.memory_storage()
        storage.before = failing(OSError("no route"), "connect")
        with pytest.raises(StorageUnavailableError, match="no route"):
            storage.open()
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
        assert storage.health().ok is False
        storage.before = lambda operation: None
        monkeypatch.setattr("hicache_storage.objects.lifecycle.OPEN_RETRY_SECONDS", 0)
        storage.open()
        assert storage.health().ok
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}

    def test_an_absent_store_is_not_asked_at_every_call(self, kit):
        storage, _pool = kit.memory_storage()
        storage.before = failing(OSError("down"))
        for _ in range(5):
            storage.batch_exists_v2(["a"])
        assert storage.operations == ["connect"]


def test_close_waits_for_calls_in_flight(kit):
    storage, _pool = kit.memory_storage()
    storage.open()
    entered, leave = threading.Event(), threading.Event()

    def slow(operation):
        if operation == "exist":
            entered.set()
            leave.wait(60)

    storage.before = slow
    caller = threading.Thread(target=storage.batch_exists_v2, args=(["a"],))
    caller.start()
    assert entered.wait(60)
    closer = threading.Thread(target=storage.close)
    closer.start()
    # From its beginning on, other calls are refused.
    eventually(lambda: not storage.health().ok)
    assert "disconnect" not in storage.operations
    leave.set()
    caller.join(60)
    closer.join(60)
    assert storage.operations[-1] == "disconnect"
