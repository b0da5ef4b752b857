"""A slot changes hands only when no earlier holder of a lease may still write into it: after a
clear, and after a restart that lost all."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.storage.factory import open_store

NOW = 1_800_000_000.0
SLOTS, LEASE, QUARANTINE = 6, 10.0, 5.0
LIMITS = msgspec.structs.replace(
    DEFAULTS, quarantine_seconds=QUARANTINE, lease_seconds=LEASE, max_lease_seconds=20.0
)
GEOMETRY = p.ScopeGeometry(scope="0:kv", slots=SLOTS)


class OneServer:
    """A server alone; started again, it loses what its store does not keep."""

    def __init__(self, address):
        self.address, self.now, self.store, self.limits = address, NOW, None, LIMITS
        self.start()

    def start(self):
        if self.store is not None:
            self.store.close()
        self.store = open_store(self.address)
        self.service = MetadataService(self.limits, durability=self.store.durability)
        self.service.restore(self.store.recover(self.now), self.store.rows, self.now)

    async def ask(self, name, request):
        self.service.settle(self.now, 10**6)
        answer = getattr(self.service, name)(request, self.now)
        self.store.write(self.service.take_changes())
        return answer

    async def counts(self):
        self.service.settle(self.now, 10**6)
        [status] = self.service.list_scopes().scopes
        return status.free, status.leased, status.live, status.quarantined

    async def close(self):
        self.store.close()


@pytest.fixture(params=["memory", "sqlite"])
def server(request, tmp_path):
    """Factory of a server, for each kind of store."""
    address = "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/m.db"
    return lambda: OneServer(address)


async def initialize(one, *earlier):
    return await one.ask(
        "initialize", p.Initialize(scopes=[GEOMETRY], earlier_lease_seconds=list(earlier))
    )


async def reserve(one, *keys, seconds=LEASE):
    request = p.Reserve(
        scopes=[p.ReserveScope(scope="0:kv", keys=list(keys))], lease_seconds=seconds
    )
    return (await one.ask("reserve", request)).scopes[0]


async def commit(one, leases):
    part = p.CommitScope(
        scope="0:kv", leases=leases, lengths=[1] * len(leases), checksums=[1] * len(leases)
    )
    return (await one.ask("commit", p.Commit(scopes=[part]))).scopes[0].states


def free(leased):
    return {
        slot
        for slot, state in zip(leased.slots, leased.states, strict=True)
        if state is p.Reserved.LEASED
    }


@asynccontextmanager
async def opened(server):
    one = server()
    try:
        yield one
    finally:
        await one.close()


async def test_a_leased_slot_that_is_cleared_rests_until_its_lease_would_have_ended(server):
    async with opened(server) as one:
        await initialize(one)
        mine = await reserve(one, "a", "b")
        stored = await reserve(one, "c", "d")
        await commit(one, stored.leases)
        one.now += 0.3
        await one.ask("clear", p.Clear(scopes=["0:kv"]))
        assert await one.counts() == (2, 0, 0, 4)
        assert await commit(one, mine.leases) == [p.Settled.STALE] * 2
        one.now = NOW + 0.3 + QUARANTINE + 0.1
        others = await reserve(one, *"uvwxyz", seconds=1.0)
        assert free(others) == set(range(SLOTS)) - free(mine), (
            "pages that were live rest no longer than a quarantine"
        )
        one.now = NOW + LEASE - 0.1
        assert not free(mine) & free(await reserve(one, *"mnopqr", seconds=60.0))
        one.now = NOW + LEASE + 0.5
        assert free(mine) <= free(await reserve(one, *"ghijkl", seconds=60.0))


async def test_a_renewed_lease_counts_and_a_lease_that_is_nearly_over_does_not_shorten_the_quarantine(
    server,
):
    async with opened(server) as one:
        await initialize(one)
        mine, short = await reserve(one, "a"), await reserve(one, "b", seconds=1.0)
        one.now += 5
        renewal = p.Renew(
            scopes=[p.LeaseScope(scope="0:kv", leases=mine.leases)], lease_seconds=15.0
        )
        await one.ask("renew", renewal)
        last = await reserve(one, "c", seconds=1.0)
        await one.ask("clear", p.Clear(scopes=["0:kv"]))
        one.now = NOW + 5 + QUARANTINE - 0.1
        assert not (free(last) | free(mine)) & free(await reserve(one, *"uvwxyz", seconds=0.2))
        one.now = NOW + 5 + 15 - 0.5
        others = free(await reserve(one, *"mnopqr", seconds=0.2))
        assert free(last) | free(short) <= others
        assert not free(mine) & others
        one.now = NOW + 5 + 15 + QUARANTINE + 1
        assert free(mine) <= free(await reserve(one, *"ghijkl", seconds=60.0))


async def test_a_cleared_lease_rests_over_a_restart_too(tmp_path):
    async with opened(lambda: OneServer(f"sqlite:///{tmp_path}/m.db")) as one:
        await initialize(one)
        mine = await reserve(one, "a", "b")
        one.now += 1
        await one.ask("clear", p.Clear(scopes=["0:kv"]))
        one.start()
        one.now = NOW + 1 + QUARANTINE + 1
        one.start()
        assert free(await reserve(one, *"uvwxyz", seconds=0.2)) == set(range(SLOTS)) - free(mine)
        one.now = NOW + LEASE + 10
        assert free(mine) <= free(await reserve(one, *"mnopqr"))


async def test_a_scope_that_is_made_anew_gives_no_slot_before_leases_of_an_earlier_server_are_over(
    server,
):
    async with opened(server) as one:
        await initialize(one, LEASE)
        assert await one.counts() == (0, 0, 0, SLOTS)
        answer = await reserve(one, "a")
        assert (answer.states, answer.slots, answer.evicted) == ([p.Reserved.FULL], [-1], 0)
        [status] = (await one.ask("inspect", p.Inspect(scope="0:kv", slots=[3]))).slots
        assert (status.state, round(status.seconds_left)) == (
            p.SlotState.QUARANTINED,
            round(LEASE + QUARANTINE),
        )
        await one.ask("clear", p.Clear(scopes=["0:kv"]))
        # Who comes later cannot open it.
        assert (await initialize(one)).created == [False]
        one.now += LEASE + QUARANTINE - 0.5
        assert not free(await reserve(one, "a"))
        one.now += 1
        assert await one.counts() == (SLOTS, 0, 0, 0)
        assert len(free(await reserve(one, *"abcdef"))) == SLOTS


async def test_a_scope_whose_file_is_new_and_one_that_is_there_are_open(server):
    async with opened(server) as one:
        assert (await initialize(one, 0.0)).created == [True]
        assert len(free(await reserve(one, *"abc"))) == 3
        assert (await initialize(one, LEASE)).created == [False]
        assert len(free(await reserve(one, *"def"))) == 3


async def test_max_leases_bound_the_wait(server):
    async with opened(server) as one:
        await initialize(one, 1e9)
        one.now += LIMITS.max_lease_seconds + QUARANTINE + 0.5
        assert free(await reserve(one, "a"))


async def test_a_copy_in_the_place_of_a_store_gives_no_slot_before_later_leases_are_over(tmp_path):
    file, copy = tmp_path / "m.db", tmp_path / "copy.db"
    one = OneServer(f"sqlite:///{file}")
    await initialize(one)
    await reserve(one, "a")
    await one.close()
    shutil.copy(file, copy)
    one = OneServer(f"sqlite:///{file}")
    assert free(await reserve(one, "b"))
    await one.close()
    # A new file often gets the inode number of the removed one.
    file.unlink()
    shutil.copy(copy, file)
    one = OneServer(f"sqlite:///{file}")
    assert not free(await reserve(one, "c"))
    one.now += LIMITS.max_lease_seconds + QUARANTINE + 1
    assert free(await reserve(one, "c"))
    await one.close()


@pytest.mark.parametrize("kind", ["memory:", "sqlite:///{}/m.db"])
async def test_a_server_that_serves_for_long_opens_new_scopes_at_once(kind, tmp_path):
    """It has given all leases since its start, and those of an earlier server are over."""
    one = OneServer(kind.format(tmp_path))

    one.now += LEASE + QUARANTINE
    await initialize(one, LEASE)
    assert free(await reserve(one, "a"))
    await one.close()


async def test_a_closed_scope_stays_closed_over_a_restart(tmp_path):
    one = OneServer(f"sqlite:///{tmp_path}/m.db")

    await initialize(one, LEASE)
    await one.ask("clear", p.Clear(scopes=["0:kv"]))
    one.now += 3
    one.start()
    assert await one.counts() == (0, 0, 0, SLOTS)
    one.now = NOW + LEASE + QUARANTINE + 0.1
    assert free(await reserve(one, "a"))
    await one.close()


async def test_the_column_is_as_long_as_that_of_the_scopes(server):
    async with opened(server) as one:
        with pytest.raises(RequestError) as caught:
            await initialize(one, 1.0, 1.0)
        assert (caught.value.status, caught.value.problem.field) == (422, "earlier_lease_seconds")


async def test_a_scope_that_gives_no_slot_yet_cannot_be_dropped_and_made_anew_open(server):
    async with opened(server) as one:
        await initialize(one, LEASE)
        with pytest.raises(RequestError, match=f"{SLOTS} slots"):
            await one.ask("drop", p.Drop(scopes=["0:kv"]))
        assert (await initialize(one)).created == [False]
        assert not free(await reserve(one, "a"))
        one.now += LEASE + QUARANTINE + 0.5
        await one.ask("drop", p.Drop(scopes=["0:kv"]))
        assert (await initialize(one)).created == [True]
        assert free(await reserve(one, "a"))


async def test_a_scope_that_is_dropped_and_made_anew_goes_on_with_the_numbers(server):
    async with opened(server) as one:
        one.now += 100
        await initialize(one)
        before = await reserve(one, "a")
        await one.ask("abort", p.Abort(scopes=[p.LeaseScope(scope="0:kv", leases=before.leases)]))
        one.now += QUARANTINE + 0.5
        await one.ask("drop", p.Drop(scopes=["0:kv"]))
        # A replica whose clock is behind has taken over.
        one.now = NOW
        await initialize(one)
        after = await reserve(one, "a")
        assert after.slots == before.slots
        assert after.leases[0] > before.leases[0]
        assert after.generations[0] > before.generations[0]
        assert await commit(one, before.leases) == [p.Settled.STALE]


async def test_leases_outlive_a_restart_that_shortens_the_limits(tmp_path):
    one = OneServer(f"sqlite:///{tmp_path}/m.db")

    await initialize(one)
    mine = await reserve(one, "a", "b", seconds=20.0)
    gone = await reserve(one, "c", seconds=20.0)
    await one.ask("clear", p.Clear(scopes=["0:kv"]))
    held = await reserve(one, "d", seconds=20.0)
    one.limits = msgspec.structs.replace(
        LIMITS, lease_seconds=2.0, max_lease_seconds=2.0, quarantine_seconds=1.0
    )
    for after in (0, 1, 1, 10):
        one.now += after
        one.start()
    assert await commit(one, held.leases) == [p.Settled.DONE]
    one.now = NOW + 19
    given = free(await reserve(one, *"uvwxyz"))
    assert given
    assert not given & (free(mine) | free(gone))
    await one.close()
