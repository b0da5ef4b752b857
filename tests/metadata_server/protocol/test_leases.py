"""The rules of the native part about leases and eviction, while time passes; `test_histories.py` has
the others."""

from __future__ import annotations

import pytest

from hicache_metadata_server import protocol as p
from tests.metadata_server.protocol.peer import keys_of


async def test_a_lease_is_as_long_as_the_limits_allow(timed):
    """MD-LEASE-3."""
    await timed.initialize(4)
    limits = (await timed.call("/v2")).limits
    for key, asked, got in (
        ("a", None, limits.lease_seconds),
        ("b", 1e9, limits.max_lease_seconds),
        ("c", 1e-3, limits.min_lease_seconds),
    ):
        part = p.ReserveScope(scope=timed.scope, keys=[key])
        answer = await timed.call("/v2/reserve", p.Reserve(scopes=[part], lease_seconds=asked))
        assert answer.lease_seconds == got
        [status] = await timed.inspect([key])
        assert status.seconds_left == pytest.approx(got, abs=1e-3)


@pytest.mark.parametrize(
    "use", ["touch", "lookup", "reserve", "nothing", "get_page_indices", "exists"]
)
async def test_what_was_used_stays(timed, use):
    """MD-EV-1, MD-EV-2 and MD-EV-5: a full scope evicts what was used least recently; a lookup
    without touch does not count."""
    await timed.initialize(12)
    keys = keys_of(12)
    for key in keys:
        await timed.store([key])
    # The oldest ones: no order of insertion explains that they stay.
    old = keys[:6]
    if use == "touch":
        request = p.Touch(scopes=[p.LookupScope(scope=timed.scope, keys=[*old, "none"])])
        [flags] = (await timed.call("/v2/touch", request)).scopes
        assert flags.done == [True] * 6 + [False]
    elif use == "lookup":
        await timed.lookup(old)
    elif use == "reserve":
        await timed.lease(old)
    elif use != "nothing":
        await timed.sglang(use, keys=old)
    await timed.lookup(keys[6:], touch=False)
    await timed.lease(keys_of(3, "n"))
    live = await timed.live(keys)
    assert live.count(False) == 3
    assert all(live[:6]) == (use != "nothing")
    assert all(live[6:]) == (use == "nothing")
