"""Real server processes: kill -9 under load, and ends in good order."""

from __future__ import annotations

import random
import time

import pytest

from hicache_metadata_server import protocol as p
from tests.metadata_server.servers import SERVE, served
from tests.metadata_server.writers import SLOTS, Writer, check_kept
from tests.support.metadata import V2Scope

pytestmark = pytest.mark.slow(seconds=25)

# A lease that ends before it is committed would be no loss.
LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 0.2 --lease-seconds 300"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 2))]
)
def test_every_acknowledged_change_survives_kill_9(seed):
    """MD-DUR-1 and MD-DUR-2."""
    chance = random.Random(seed)
    with served(LASTING) as (place, client):
        scope = V2Scope(client, "0:kv", SLOTS, 4096, chance)
        scope.initialize()
        writers = [Writer(place.url, number) for number in range(3)]
        for writer in writers:
            writer.start()
        time.sleep(chance.uniform(0.3, 1.5))
        place.kill()
        for writer in writers:
            writer.join()
        place.start()
        assert all(writer.live or writer.unsure for writer in writers), (
            "a writer got nothing done before the kill"
        )
        check_kept(scope, writers)


@pytest.mark.parametrize("durability", ["process", "machine"])
def test_what_was_answered_holds_after_kill_9(durability):
    """MD-IDEM-2: a repeated request gets the same answer; numbers go on, in another instance."""
    with served(f"{LASTING} --durability {durability}") as (place, client):
        scope = V2Scope(client, "0:kv", 8, 4096, random.Random(1))
        scope.initialize()
        deleted, kept = scope.store(["deleted", "kept"])
        scope.delete(["deleted"])
        request = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["a", "b"])])
        once = {p.IDEMPOTENCY_HEADER: "once"}
        instance = client.call("/v2", None, p.About).instance
        first = client.post("/v2/reserve", request, headers=once)
        place.kill()
        place.start()
        assert client.call("/v2", None, p.About).instance != instance
        again = client.post("/v2/reserve", request, headers=once)
        assert (again.status, again.body) == (first.status, first.body) == (200, first.body)
        leased = p.decode(again.body, p.Leases).scopes[0]
        assert scope.commit(leased.leases, [1, 1], [1, 1]) == [True, True]
        found = scope.lookup(["deleted", "kept", "a", "b"])
        assert found.slots == [-1, kept.slot, *leased.slots]
        assert found.checksums[:2] == [0, kept.checksum]
        new = scope.reserve(["c", "d"])
        assert min(new.leases) > max(*leased.leases, deleted.lease)
