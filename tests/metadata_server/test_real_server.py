"""Real server processes: kill -9 of servers, and of the Redis that several share, under load; and
ends in good order."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from hicache_metadata_server import protocol as p
from tests.metadata_server import services
from tests.metadata_server.redis_servers import redis_server
from tests.metadata_server.servers import SERVE, RemoteService, Served, served
from tests.support.commands import run_metadata
from tests.support.metadata import HttpClient, Refused, Unanswered
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=35)

# A lease that ends before it is committed would be no loss.
LEASES = "--quarantine-seconds 0.2 --lease-seconds 300"
LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db {LEASES}"
# So many that nothing is evicted.
SLOTS = 1_000_000


class Writer(threading.Thread):
    """Stores and deletes batches until an error says that the server is gone, or it is told to end,
    and remembers what it was told."""

    def __init__(self, url, number):
        super().__init__(daemon=True)
        self.ends = threading.Event()
        self.chance, self.number = random.Random(number), number
        self.service = RemoteService(HttpClient(url))
        self.live, self.gone, self.unsure = {}, [], set()

    def run(self):
        with suppress(Unanswered):
            for batch in itertools.takewhile(lambda _: not self.ends.is_set(), itertools.count()):
                # While Redis is gone, or stalls on a busy machine, servers refuse.
                with suppress(Refused):
                    self.change(batch)

    def change(self, batch):
        count = self.chance.choice((1, 16, 128))
        keys = [f"{self.number}-{batch}-{i}" for i in range(count)]
        leased = services.store(self.service, keys)
        self.live |= dict(zip(keys, zip(leased.slots, leased.leases, strict=True), strict=True))
        if self.chance.random() < 0.3:
            gone = self.chance.sample(list(self.live), min(len(self.live), 20))
            self.unsure |= set(gone)
            services.delete(self.service, gone)
            for key in gone:
                del self.live[key]
            self.gone += gone
            self.unsure -= set(gone)


def check_kept(service, writers):
    """All that was acknowledged is there, each page in a slot of its own, and the server finds
    nothing wrong."""
    slots = []
    for writer in writers:
        keys = [key for key in writer.live if key not in writer.unsure]
        # A fast machine writes more in the time than one request may ask for.
        for start in range(0, len(keys), 4000):
            some = keys[start : start + 4000]
            found = services.lookup(service, some)
            pages = [(slot, services.checksum(lease)) for slot, lease in map(writer.live.get, some)]
            assert list(zip(found.slots, found.checksums, strict=True)) == pages
            slots += found.slots
        assert not any(slot >= 0 for slot in services.lookup(service, writer.gone[:4000]).slots)
    assert len(set(slots)) == len(slots)
    assert service.fsck(p.Fsck(), 0).problems == []


@contextmanager
def killable(killed, directory):
    """Servers on one store, and the one of them that is killed, or their Redis."""
    with ExitStack() as stack:
        if killed == "the server":
            place = stack.enter_context(Served(command=f"{LASTING} --durability machine"))
            yield [place], place
            return
        redis = stack.enter_context(redis_server(directory, appendonly="yes", appendfsync="always"))
        command = f"{SERVE} {LEASES} --store {redis.url} --durability machine"
        places = [stack.enter_context(Served(command=command)) for _ in range(2)]
        # The owner: it makes the scope.
        yield places, redis if killed == "redis" else places[0]


@pytest.mark.parametrize(
    ("killed", "seed"),
    [
        ("the server", 0),
        *(pytest.param("the server", seed, marks=pytest.mark.long) for seed in (1, 2)),
        ("one of two servers", 0),
        ("redis", 0),
    ],
)
def test_every_acknowledged_change_survives_kill_9(tmp_path, killed, seed):
    """MD-DUR-1 and MD-DUR-2."""
    with killable(killed, tmp_path) as (places, victim):
        first, *_, last = (service_of(place) for place in (places[0], *places))
        services.initialize(first, "0:kv", slots=SLOTS)
        writers = [Writer(places[n % len(places)].url, n) for n in range(3)]
        for writer in writers:
            writer.start()
        eventually(lambda: all(len(writer.live) > 200 for writer in writers))
        time.sleep(random.Random(seed).uniform(0.0, 1.0))
        victim.kill()
        for writer in writers:
            # The other server may own the scope by now.
            writer.ends.set()
            writer.join()
        if victim is not places[0] or len(places) == 1:
            victim.start()
        eventually(lambda: is_served(last))
        check_kept(last, writers)


def test_what_was_answered_holds_after_kill_9():
    """MD-IDEM-2: a repeated request gets the same answer; numbers go on, in another instance."""
    with served(LASTING) as (place, client):
        service = RemoteService(client)
        services.initialize(service, "0:kv", slots=8)
        stored = services.store(service, ["deleted", "kept"])
        services.delete(service, ["deleted"])
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
        assert services.commit(service, leased.leases) == [p.Settled.DONE] * 2
        found = services.lookup(service, ["deleted", "kept", "a", "b"])
        assert found.slots == [-1, stored.slots[1], *leased.slots]
        assert found.checksums[:2] == [0, services.checksum(stored.leases[1])]
        new = services.reserve(service, ["c", "d"])
        assert min(new.leases) > max(*leased.leases, *stored.leases)


def test_status_lists_the_servers(tmp_path):
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path, appendonly="yes", appendfsync="no"))
        places = [
            stack.enter_context(Served(command=f"{SERVE} --store {redis.url}")) for _ in range(2)
        ]
        one, other = (place.url for place in places)
        services.initialize(service_of(places[0]), "0:kv", slots=SLOTS)

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


def service_of(place):
    client = HttpClient(place.url)
    eventually(lambda: client.get("/readyz").status == 200)
    return RemoteService(client)


def is_served(service):
    with suppress(Refused):
        ready = service.client.get("/readyz").status == 200
        return ready and bool(services.lookup(service, ["none"]))
    return False
