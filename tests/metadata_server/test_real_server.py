"""Real server processes: kill -9 of servers, and of the Redis that several share, under load; and
ends in good order."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from hicache_metadata_server import protocol as p
from tests.metadata_server.redis_servers import redis_server
from tests.metadata_server.servers import SERVE, Served, served
from tests.support.commands import run_metadata
from tests.support.metadata import HttpClient, Refused, Unanswered, V2Scope
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=35)

# A lease that ends before it is committed would be no loss.
LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 0.2 --lease-seconds 300"
# So many that nothing is evicted.
SLOTS = 1_000_000


class Writer(threading.Thread):
    """Stores and deletes batches until an error says that the server is gone, and remembers what it
    was told."""

    def __init__(self, url, number, *ends):
        super().__init__(daemon=True)
        self.ends = ends
        self.chance, self.number = random.Random(number), number
        self.client = HttpClient(url)
        self.live, self.gone, self.unsure = {}, [], set()

    def run(self):
        scope = V2Scope(self.client, "0:kv", SLOTS, 4096, self.chance)
        with suppress(*self.ends):
            for batch in range(10_000):
                count = self.chance.choice((1, 16, 128))
                keys = [f"{self.number}-{batch}-{i}" for i in range(count)]
                self.unsure = set(keys)
                pages = scope.store(keys)
                self.live |= {page.key: (page.slot, page.checksum) for page in pages}
                self.unsure = set()
                if self.chance.random() < 0.3:
                    gone = self.chance.sample(list(self.live), min(len(self.live), 20))
                    self.unsure = set(gone)
                    scope.delete(gone)
                    for key in gone:
                        del self.live[key]
                    self.gone += gone
                    self.unsure = set()


def check_kept(scope, writers):
    """All that was acknowledged is there, each page in a slot of its own, and the server finds
    nothing wrong."""
    slots = []
    for writer in writers:
        keys = [key for key in writer.live if key not in writer.unsure]
        # A fast machine writes more in the time than one request may ask for.
        for start in range(0, len(keys), 4000):
            some = keys[start : start + 4000]
            found = scope.lookup(some)
            pages = list(zip(found.slots, found.checksums, strict=True))
            assert pages == [writer.live[key] for key in some]
            slots += found.slots
        assert not any(slot >= 0 for slot in scope.lookup(writer.gone[:4000]).slots)
    assert len(set(slots)) == len(slots)
    assert scope.client.call("/v2/fsck", p.Fsck(), p.FsckReport).problems == []


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 2))]
)
def test_every_acknowledged_change_survives_kill_9(seed):
    """MD-DUR-1 and MD-DUR-2."""
    chance = random.Random(seed)
    with served(LASTING) as (place, client):
        scope = V2Scope(client, "0:kv", SLOTS, 4096, chance)
        scope.initialize()
        writers = [Writer(place.url, number, Unanswered) for number in range(3)]
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


@pytest.mark.parametrize("killed", ["a server", "redis"])
def test_every_acknowledged_change_survives_kill_9_of_a_server_or_its_redis(tmp_path, killed):
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path, appendonly="yes", appendfsync="always"))
        command = f"{SERVE} --quarantine-seconds 0.2 --lease-seconds 300 --store {redis.url} --durability machine"
        places = [stack.enter_context(Served(command=command)) for _ in range(2)]
        scopes = [scope_of(HttpClient(place.url)) for place in places]
        scopes[0].initialize()
        # While Redis is gone, servers refuse.
        ends = (Unanswered, Refused)
        writers = [Writer(places[number % 2].url, number, *ends) for number in range(3)]
        for writer in writers:
            writer.start()
        eventually(lambda: all(len(writer.live) > 200 for writer in writers))
        if killed == "redis":
            redis.kill()
        else:
            # The owner: it has made the scope.
            places[0].kill()
        for writer in writers:
            writer.join()
        if killed == "redis":
            redis.start()
        eventually(lambda: is_served(scopes[1]))
        check_kept(scopes[1], writers)


def test_status_lists_the_servers(tmp_path):
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path, appendonly="yes", appendfsync="no"))
        places = [
            stack.enter_context(Served(command=f"{SERVE} --store {redis.url}")) for _ in range(2)
        ]
        one, other = (place.url for place in places)
        scope_of(HttpClient(one)).initialize()

        def listed(state):
            done = run_metadata("status", "--json", "--url", one)
            servers = {server["url"]: server for server in json.loads(done.stdout)["servers"]}
            mine = servers.pop(one)
            assert (mine["state"], mine["scopes"]) == ("serving", 1)
            assert mine["log_bytes"] > 0
            return servers == {other: {"url": other, "state": state, "scopes": 0, "log_bytes": 0}}

        eventually(lambda: listed("serving"))
        # The owner of each scope checks it, whoever is asked.
        checked = run_metadata("fsck", "--url", other)
        assert f"{SLOTS:,} slots checked, no problems" in checked.output
        done = run_metadata("status", "--url", one)
        assert f"{one}  serving, 1 scopes, logs of" in done.output
        assert f"{other}  serving, 0 scopes, logs of 0 bytes" in done.output
        assert HttpClient(other).post("/v2/drain", {"enabled": True}).status == 200
        eventually(lambda: listed("draining"))
        places[1].kill()
        eventually(lambda: listed("silent"))


def scope_of(client):
    eventually(lambda: client.get("/readyz").status == 200)
    return V2Scope(client, "0:kv", SLOTS, 4096, random.Random(1))


def is_served(scope):
    with suppress(Refused):
        return scope.client.get("/readyz").status == 200 and bool(scope.lookup(["none"]))
    return False
