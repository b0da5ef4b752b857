"""`Call`: what a driver is told about the call that it serves."""

from __future__ import annotations

import pytest

from hicache_storage.objects import Call
from hicache_storage.spec import CancellationToken, StorageTimeoutError


def test_an_operation_takes_no_longer_than_its_call():
    assert Call().timeout(2.0) == Call(60.0).timeout(2.0) == 2.0
    assert 0 < Call(60.0).timeout(3600.0) <= 60.0


def test_a_call_that_is_over_raises_since_sockets_would_not_wait_at_all_with_0():
    token = CancellationToken()
    token.cancel()
    for call in (Call(0.0), Call(cancellation=token)):
        with pytest.raises(StorageTimeoutError, match="the call is over"):
            call.timeout(2.0)


def test_the_head_of_a_chain_is_used_last():
    call = Call(prefix_keys=["a", "b"])
    assert call.lru_order(["c", "d"]) == ["d", "c", "b", "a"]
    assert Call().lru_order(["c", "d"]) == ["d", "c"]
