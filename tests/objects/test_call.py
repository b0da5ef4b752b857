"""`Call`: what a driver is told about the call that it serves."""

from __future__ import annotations

import pytest

from hicache_storage.objects import Call
from hicache_storage.spec import CancellationToken, StorageTimeoutError


class TestTimeout:
    def test_an_operation_may_take_what_it_asks_for(self):
        assert Call().timeout(2.0) == 2.0
        assert Call(60.0).timeout(2.0) == 2.0

    def test_an_operation_may_not_take_longer_than_its_call(self):
        assert 0 < Call(60.0).timeout(3600.0) <= 60.0

    def test_a_call_that_is_over_raises_since_sockets_would_not_wait_at_all_with_0(self):
        with pytest.raises(StorageTimeoutError, match="the call is over"):
            Call(0.0).timeout(2.0)
        token = CancellationToken()
        token.cancel()
        with pytest.raises(StorageTimeoutError, match="the call is over"):
            Call(cancellation=token).timeout(2.0)


def test_the_head_of_a_chain_is_used_last():
    call = Call(prefix_keys=["a", "b"])
    assert call.lru_order(["c", "d"]) == ["d", "c", "b", "a"]
    assert Call().lru_order(["c", "d"]) == ["d", "c"]
