"""The rules of the native part about leases, quarantine and eviction, while time passes."""

from __future__ import annotations

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.protocol import Reserved
from tests.metadata_server.protocol.peer import LEASE, OUT, QUARANTINE, keys_of


def states(leased):
    return "".join(state[0] for state in leased.states)


async def test_what_reserve_says_of_each_key(timed):
    """MD-LEASE-1: leased, exists, busy or full; no lease and no slot twice."""
    await timed.initialize(8)
    # Two pages that are evicted, and whose slots are quarantined then.
    old = await timed.store(["u", "v"])
    pages = await timed.store(["s", "t"])
    new = keys_of(6)
    asked = ["s", new[0], new[0], *new[1:], "t"]
    answer = await timed.lease(asked)
    assert states(answer) == "el" + "b" + "lll" + "ff" + "e"
    assert [answer.slots[0], answer.slots[-1]] == [page.slot for page in pages]
    given = [slot for slot, lease in zip(answer.slots, answer.leases, strict=True) if lease]
    assert sorted([*given, *(page.slot for page in [*old, *pages])]) == list(range(8))
    leases = {lease for lease in answer.leases if lease}
    assert len(leases) == 4
    assert min(leases) > 0
    for state, slot, generation in zip(
        answer.states, answer.slots, answer.generations, strict=True
    ):
        assert (slot >= 0) == (generation > 0) == (state in (Reserved.LEASED, Reserved.EXISTS))


async def test_stale_leases(timed):
    """MD-LEASE-2: a held one among them is committed."""
    await timed.initialize(32)
    keys = keys_of(4)
    aborted, held, deleted, cleared = (await timed.lease(keys)).leases
    assert await timed.abort([aborted]) == [True]
    await timed.commit([deleted])
    await timed.delete([keys[2]])
    stale = [aborted, held + 10**9, deleted]
    assert await timed.commit([stale[0], held, *stale[1:]]) == [False, True, False, False]
    assert await timed.live(keys) == [False, True, False, False]
    await timed.clear()
    assert await timed.commit([cleared, held]) == [False, False]
    assert await timed.renew([cleared, *stale], LEASE) == [False] * 4
    assert await timed.abort([cleared, *stale]) == [False] * 4
    assert not any(await timed.live(keys))


async def test_committing_again(timed):
    """MD-LEASE-2: done while the page is live and the same; that and an abort change nothing."""
    await timed.initialize(8)
    [page] = await timed.store(["a"])
    same = [page.lease], [page.length], [page.checksum]
    assert await timed.commit(*same) == [True]
    assert await timed.abort([page.lease]) == [False]
    assert await timed.commit([page.lease], [page.length], [page.checksum ^ 1]) == [False]
    assert await timed.commit([page.lease], [page.length + 1], [page.checksum]) == [False]
    found = await timed.lookup(["a"])
    assert (found.lengths, found.checksums) == ([page.length], [page.checksum])
    await timed.delete(["a"])
    assert await timed.commit(*same) == [False]
    assert await timed.live(["a"]) == [False]


async def test_a_lease_ends(timed):
    """MD-LEASE-3: until its end its key is busy, then it is stale."""
    await timed.initialize(4)
    keys = keys_of(4)
    first = await timed.lease(keys, lease_seconds=7.0)
    timed.wait(6.9)
    assert states(await timed.lease(keys)) == "bbbb"
    timed.wait(0.1)
    assert not any(await timed.commit(first.leases))
    assert not any(await timed.live(keys))
    timed.wait(QUARANTINE)
    again = await timed.lease(keys)
    assert states(again) == "llll"
    assert not set(again.leases) & set(first.leases)


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


async def test_renewing(timed):
    """MD-LEASE-4: from now on, and nothing that has ended. MD-LEASE-5: nor is that aborted."""
    await timed.initialize(8)
    kept, left = (await timed.lease(["a", "b"])).leases
    timed.wait(LEASE / 2)
    assert await timed.renew([kept], LEASE) == [True]
    timed.wait(LEASE / 2)
    assert await timed.renew([left], LEASE) == [False]
    assert await timed.abort([left, kept, kept]) == [False, True, False]
    assert states(await timed.lease(["b"])) == "l"


async def let_go(peer, how):
    """Let all six slots of a scope go; returns when the last of them may be given again."""
    keys = keys_of(6)
    if how == "abandoned":
        await peer.lease(keys)
        peer.wait(LEASE)
        assert not await peer.given(6), "their ends have to be seen first"
    elif how == "aborted":
        await peer.abort((await peer.lease(keys)).leases)
    else:
        await peer.store(keys)
        if how == "deleted":
            await peer.delete(keys)
        elif how == "cleared":
            assert await peer.clear() == 6
        else:
            assert not await peer.given(6), "evicted for whom a quarantine has to wait"
            assert not any(await peer.live(keys))


@pytest.mark.parametrize("how", ["deleted", "evicted", "cleared", "aborted", "abandoned"])
async def test_slots_rest_for_a_quarantine(timed, how):
    """MD-QUAR-1: and come back after it, each once and of a later generation (MD-GEN-1)."""
    await timed.initialize(6)
    before = {status.slot: status.generation for status in await timed.inspect(slots=range(6))}
    await let_go(timed, how)
    rested = {status.slot: status.generation for status in await timed.inspect(slots=range(6))}
    assert all(rested[slot] > before[slot] for slot in range(6))
    timed.wait(QUARANTINE - 0.1)
    assert not await timed.given(6)
    timed.wait(0.1)
    leased = await timed.lease(keys_of(7, "n"))
    assert states(leased) == "llllllf"
    assert sorted(leased.slots) == [-1, *range(6)]
    assert all(
        generation > rested[slot]
        for slot, generation in zip(leased.slots, leased.generations, strict=True)
        if slot >= 0
    )


async def test_eviction_spares_leased_slots(timed):
    """MD-EV-4."""
    await timed.initialize(9)
    keys = keys_of(6)
    await timed.store(keys)
    leased = await timed.lease(keys_of(3, "l"), lease_seconds=OUT)
    await timed.lease(keys_of(9, "n"))
    timed.wait(QUARANTINE)
    given = {slot for slot in (await timed.lease(keys_of(9, "n"))).slots if slot >= 0}
    assert given == set(range(9)) - set(leased.slots)
    assert not any(await timed.live(keys))
    assert all(await timed.commit(leased.leases))


async def test_tails_go_before_heads(timed):
    """MD-EV-3: whatever the order in which chains were written and read."""
    lengths = [3, 5, 4]
    await timed.initialize(sum(lengths))
    chains = [keys_of(length, f"{number}-") for number, length in enumerate(lengths)]
    # Tails first in each batch, and used last.
    for chain in chains:
        await timed.store(chain[::-1], [*chain[-2::-1], ""])
    for depth in range(max(lengths)):
        await timed.lookup([chain[depth] for chain in chains if depth < len(chain)])
    for count in (1, 2, 3):
        await timed.lease(keys_of(count, f"n{count}-"), lease_seconds=OUT)
        timed.wait(QUARANTINE)
        await timed.lease(keys_of(count, f"n{count}-"), lease_seconds=OUT)
        for chain in chains:
            live = await timed.live(chain)
            assert live == sorted(live, reverse=True)
    assert sum([sum(await timed.live(chain)) for chain in chains]) == sum(lengths) - 6


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
