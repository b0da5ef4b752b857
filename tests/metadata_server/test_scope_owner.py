"""Servers that share scopes, on a real Redis and in simulated time.

Each server has a clock of its own, wrong by hours and in rate, and can be paused at any step. Two
never serve one scope, and what was acknowledged is in every later owner's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import FencedError, RequestError, StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.shared import ownership, scope_log, scope_owner
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.ownership import (
    Observer,
    ServerRecord,
    placement,
    process_has_ended,
    this_process,
)
from hicache_metadata_server.shared.scope_log import ScopeLogStore
from hicache_metadata_server.shared.scope_owner import ScopeOwner
from tests.metadata_server.services import commit, reserve

pytestmark = pytest.mark.slow(seconds=20)

SCOPES = ("0:kv", "0:mamba", "1:kv")
LEASE = 3.0
REAL_SECONDS = 30.0
"""Limit of a request. Time is simulated: a machine that stands still for a second ends none."""
DRIFT = 0.04
"""Clocks differ in rate by up to twice this, less than the margin of a lease."""


class World:
    """Simulated time, and a loop in which all servers of a test run."""

    def __init__(self, redis):
        self.redis, self.time, self.runner = redis, 1000.0, asyncio.Runner()
        self.check = lambda: None
        """Called at every step of a heartbeat."""
        with redis.client() as client:
            client.flushall()

    def do(self, coroutine):
        return self.runner.run(coroutine)

    def close(self):
        self.runner.close()


class Server:
    """A server as a process has it, but for its requests, which are the test's."""

    def __init__(self, world, number, *, offset=0.0, rate=1.0):
        self.world, self.paused, self.others = world, False, ()
        self.before = self.after = 0.0
        self.wall = lambda: 1_700_000_000.0 + offset + rate * world.time
        self.service = MetadataService(
            DEFAULTS, durability=p.StoreDurability.PROCESS, shares_store=True
        )
        self.connection, self.written = (
            RedisConnection(world.redis.url, REAL_SECONDS) for _ in range(2)
        )
        self.store = ScopeLogStore(self.written, self.wall)
        self._run, self.connection.run = self.connection.run, self._slowly
        self._command, self.connection.command = self.connection.command, self._checked
        self.owner = ScopeOwner(
            self.connection,
            self.service,
            self.store,
            url=f"http://server-{number}",
            now=self.wall,
            lease_seconds=LEASE,
            clock=lambda: offset + rate * world.time,
        )
        self.owner.flush = self._write

    async def _slowly(self, calls):
        """Requests and answers take their time, in which the others go on."""
        self.world.check()
        before, after = self.before, self.after
        self.before = self.after = 0.0
        await self._passes(before)
        answers = await self._run(calls)
        await self._passes(after)
        return answers

    async def _checked(self, *parts):
        self.world.check()
        return await self._command(*parts)

    async def _passes(self, seconds):
        until = self.world.time + seconds
        while self.world.time < until:
            self.world.time += 0.25
            for other in self.others:
                if not other.paused:
                    await other.owner.beat()
                    self.world.check()

    def beat(self, before=0.0, after=0.0, others=()):
        """Its next request takes `before` to reach Redis, and the answer `after` to come back."""
        self.before, self.after, self.others = before, after, others
        self.world.do(self.owner.beat())
        self.others = ()

    def make(self, *names):
        """Create those of these scopes that nobody has."""
        parts = [p.ScopeGeometry(scope=name, slots=100_000) for name in names]
        parts = [part for part in parts if part.scope not in self.owner.entries]
        if parts:
            assert self.world.do(self.owner.create(parts, ""))
            self.service.initialize(p.Initialize(scopes=parts), self.wall())
            self.owner.attach()
            self.write()

    def write(self):
        """Write all changes; True if they are acknowledged."""
        return self.world.do(self._write())

    async def _write(self):
        changes = self.service.take_changes()
        try:
            await self.store.append(changes)
        except FencedError as fenced:
            self.service.put_back(changes)
            self.owner.drop(fenced.scopes)
            return False
        return True

    def give_back(self):
        self.world.do(self.owner.give_back(list(self.service.scopes)))

    def change(self, scope, key, *, writes=True):
        """Store a page; True if it is acknowledged."""
        leased = reserve(self.service, [key], scope, self.wall())
        commit(self.service, leased.leases, scope, self.wall())
        return writes and self.write()

    def live(self, scope, keys):
        part = p.LookupScope(scope=scope, keys=keys)
        slots = self.service.lookup(p.Lookup(scopes=[part]), self.wall()).scopes[0].slots
        return [key for key, slot in zip(keys, slots, strict=True) if slot >= 0]

    def close(self):
        self.world.do(self.connection.close())
        self.world.do(self.written.close())


@pytest.fixture
def world(redis):
    made = World(redis)
    yield made
    made.close()


@pytest.fixture
def two(world):
    servers = [Server(world, 0), Server(world, 1, offset=-7200.0)]
    for _ in range(2):
        for server in servers:
            server.beat()
    yield servers
    for server in servers:
        server.close()


def serving(servers, scope):
    return [number for number, server in enumerate(servers) if server.owner.serves([scope])]


def pass_time(world, servers, seconds):
    """Beats of all that are awake."""
    until = world.time + seconds
    while world.time < until:
        world.time += 0.25
        for server in servers:
            if not server.paused:
                server.beat()
                world.check()


def test_an_incarnation_takes_nothing_before_its_first_heartbeat(world, two):
    """The other one would see no record of it, and take what it has taken."""
    one, other = two
    one.make("0:kv")
    pass_time(world, two, 0.5)
    one.beat(after=LEASE)
    assert serving(two, "0:kv") == []
    world.check = lambda: len(serving(two, "0:kv")) <= 1 or pytest.fail("two serve")
    pass_time(world, [other], LEASE - 0.25)
    one.beat(before=1.5, others=[other])
    pass_time(world, two, 1.0)
    assert len(serving(two, "0:kv")) == 1


def test_scopes_that_are_given_back_are_taken_with_the_next_heartbeat(world, two):
    one, other = two
    one.make("0:kv", "0:mamba")
    one.change("0:kv", "a", writes=False)
    one.service.draining = True
    one.give_back()
    world.time += 0.25
    other.beat()
    assert serving(two, "0:kv") == serving(two, "0:mamba") == [1]
    assert other.live("0:kv", ["a"]) == ["a"]
    one.beat()
    assert one.owner.entries["0:kv"].group == one.owner.entries["0:mamba"].group
    other.service.draining = True
    pass_time(world, two, 1.0)
    assert serving(two, "0:kv") == [1], "there is nobody else"


@pytest.mark.parametrize("unread", ["", "0:mamba"], ids=["all are read", "one is not"])
def test_the_heap_is_trimmed_once_after_scopes_were_taken(world, two, monkeypatch, unread):
    """A takeover needs as much memory beyond the pages as the pages."""
    one, other = two
    made, read = [], scope_owner.load

    async def failing(connection, name, token):
        if name == unread:
            raise StoreError("Redis has not answered")
        return await read(connection, name, token)

    monkeypatch.setattr(scope_owner, "load", failing)
    monkeypatch.setattr(scope_owner, "trim_heap", lambda: made.append(owned([other])[0]))
    one.make("0:kv", "0:mamba")
    pass_time(world, two, 1.0)
    assert made == []
    one.service.draining = True
    one.give_back()
    with pytest.raises(StoreError) if unread else contextlib.nullcontext():
        pass_time(world, two, 1.0)
    assert made == [[name for name in ("0:kv", "0:mamba") if name != unread]]


def test_a_server_takes_scopes_of_its_own_ended_life_at_once(world, two):
    one, _ = two
    one.make("0:kv")
    first = one.owner.incarnation.id
    world.time += 100.0
    assert not one.owner.serves(["0:kv"])
    # Nobody else: the other one has to observe it for a lease.
    for _ in range(2):
        one.beat()
    assert one.owner.incarnation.id != first
    assert one.owner.serves(["0:kv"])


def test_a_scope_whose_log_lost_writes_gives_no_slot_for_the_longest_lease(world, two, client):
    one, other = two
    one.make("0:kv")
    one.change("0:kv", "a")
    client.hset("hm:{0:kv}:head", "seq", 1)
    assert not one.change("0:kv", "b")
    pass_time(world, [one], 1.0)
    assert one.owner.serves(["0:kv"])
    assert reserve(one.service, ["c"], now=one.wall()).states == [p.Reserved.FULL]
    one.give_back()
    one.service.draining = True
    one.beat()
    other.beat()
    assert serving(two, "0:kv") == [1]
    assert reserve(other.service, ["c"], now=other.wall()).states == [p.Reserved.FULL]
    longest = DEFAULTS.max_lease_seconds + DEFAULTS.quarantine_seconds
    leased = reserve(other.service, ["c"], now=other.wall() + longest + 1)
    assert leased.states == [p.Reserved.LEASED]


@pytest.mark.parametrize("lost", ["", "log", "rest"], ids=["never acknowledged", "log", "rest"])
def test_a_scope_without_its_record_is_forgotten_and_can_be_made_again(
    world, two, client, lost, monkeypatch
):
    """Its server has ended before it was acknowledged, or Redis has lost it."""
    monkeypatch.setattr(scope_log, "IDLE_LOG_BYTES", 0)
    one, other = two
    if not lost:
        world.do(one.owner.create([p.ScopeGeometry(scope="0:kv", slots=10)], ""))
        one.paused = True
    else:
        one.make("0:kv")
        while lost == "rest" and one.store.wants_compaction(idle=True):
            batch = one.store.collect(one.service.scope_of)
            world.do(one.store.replace_blocks(batch, one.wall()))
        client.delete(f"hm:{{0:kv}}:{lost}")
        assert one.change("0:kv", "a")
        one.give_back()
    pass_time(world, two, LEASE + 1.0)
    assert serving(two, "0:kv") == []
    assert not client.exists("hm:{0:kv}:head")
    assert "0:kv" not in other.owner.entries
    other.make("0:kv")
    assert serving(two, "0:kv") == [1]


def test_two_that_create_one_scope(world, two):
    one, other = two
    part = p.ScopeGeometry(scope="0:kv", slots=10)
    assert world.do(one.owner.create([part], ""))
    assert not world.do(other.owner.create([part], "")), "the map is another one by now"
    one.service.initialize(p.Initialize(scopes=[part]), one.wall())
    other.owner.attach()
    one.owner.attach()
    assert one.write()
    pass_time(world, two, 1.0)
    assert serving(two, "0:kv") == [0]
    assert "0:kv" not in other.service.scopes


def test_a_scope_that_redis_has_lost_is_dropped(world, two, client):
    one, _ = two
    one.make("0:kv", "0:mamba")
    client.delete("hm:{0:kv}:head")
    client.hdel("hm:{map}:scopes", "0:kv")
    client.incr("hm:{map}:version")
    one.beat()
    assert not one.owner.serves(["0:kv"])
    assert one.owner.serves(["0:mamba"])


def owned(servers):
    return [sorted(server.service.scopes) for server in servers]


def test_idle_scopes_go_to_a_server_that_joins(world, two):
    one, other = two
    for names in (("0:kv", "0:mamba"), ("1:kv",), ("2:kv",), ("3:kv",)):
        one.make(*names)
        assert one.change(names[0], "a")
        one.beat()
    scopes = tuple(one.service.scopes)
    world.check = lambda: (
        all(len(serving(two, name)) <= 1 for name in scopes) or pytest.fail("two serve")
    )
    pass_time(world, two, scope_owner.IDLE_SECONDS + 2.0)
    # Of five, of which two are asked for together.
    assert owned(two) == [["0:kv", "0:mamba", "3:kv"], ["1:kv", "2:kv"]]
    assert other.live("1:kv", ["a"]) == ["a"]
    before = owned(two)
    pass_time(world, two, scope_owner.OFFER_SECONDS + 2.0)
    assert owned(two) == before, "they are even"
    late = Server(world, 2)
    other.service.draining = True
    pass_time(world, [*two, late], 2.0)
    assert owned([other]) == [[]]
    other.service.draining = False
    pass_time(world, [*two, late], scope_owner.OFFER_SECONDS + 2.0)
    assert sorted(map(len, owned([*two, late]))) == [1, 2, 2]
    late.close()


def test_a_scope_that_is_asked_for_stays(world, two):
    one = two[0]
    one.make("0:kv")
    one.beat()
    one.make("1:kv")
    for number in range(10):
        assert one.live("0:kv", ["a"]) == []
        assert one.change("1:kv", f"k{number}")
        pass_time(world, two, scope_owner.IDLE_SECONDS - 1.0)
    assert owned(two) == [["0:kv", "1:kv"], []]
    pass_time(world, two, scope_owner.IDLE_SECONDS + 1.0)
    assert sorted(map(len, owned(two))) == [1, 1]


def test_a_request_waits_for_no_owner_for_ever(world, two):
    one, other = two
    one.make("0:kv")
    other.beat()
    assert world.do(other.owner.admit(["0:kv"])) == "http://server-0"
    assert world.do(other.owner.admit(["nobody:has"])) == ""
    one.service.draining = True
    one.give_back()
    one.beat()
    assert one.owner.entries["0:kv"].owner == ""

    async def admitted():
        asking = asyncio.create_task(one.owner.admit(["0:kv"]))
        while not asking.done():
            await asyncio.sleep(0.001)
            world.time += 0.1
        return await asking

    with pytest.raises(RequestError) as refused:
        world.do(admitted())
    assert (refused.value.status, refused.value.problem.code) == (503, "moving")


def test_scopes_that_another_server_cannot_read_are_not_offered_again_and_again(
    world, two, monkeypatch
):
    one, other = two
    one.make("0:kv")
    one.beat()
    one.make("1:kv")
    refused = list[str]()

    async def refuse(name):
        refused.append(name)

    monkeypatch.setattr(other.owner, "_take", refuse)
    pass_time(world, two, scope_owner.OFFER_SECONDS)
    assert set(refused) == {"0:kv", "1:kv"}
    assert owned(two) == [["0:kv", "1:kv"], []]
    refused.clear()
    pass_time(world, two, 2.0)
    assert len(set(refused)) <= 1


def test_a_server_is_gone_whose_record_has_not_changed_for_a_lease():
    observer, seen = Observer(LEASE), {"a": msgspec.msgpack.encode(ServerRecord("", 1, LEASE))}
    for records, run_id, sent, is_gone in (
        (seen, b"x", 0.0, False),
        # From the answer to the next question.
        (seen, b"x", 3.0, False),
        (seen, b"x", 3.1, True),
        # Another primary begins all observations anew.
        (seen, b"y", 3.3, False),
        # A record that is missing now was there just before.
        ({}, b"y", 6.4, False),
        ({}, b"y", 9.5, True),
    ):
        observer.observe(records, run_id, sent, sent + 0.1)
        assert observer.is_gone("a") == is_gone, sent
    assert not observer.is_gone("never seen")


def test_scopes_of_a_process_that_was_killed_here_are_taken_at_once(world, two):
    one, other = two
    one.make("0:kv")
    place = this_process().rpartition(" ")[0]
    child = subprocess.Popen(["sleep", "60"])
    process = f"{place} {child.pid}"
    try:
        assert not process_has_ended(this_process())
        assert not process_has_ended(process)
    finally:
        child.kill()
        child.wait()
    assert process_has_ended(process)
    assert not process_has_ended(f"another-boot pid:[1] {child.pid}")
    assert not process_has_ended("")
    one.owner._process = process
    one.beat()
    pass_time(world, [other], 1.0)
    assert other.owner.serves(["0:kv"])


def test_a_server_serves_lookups_while_redis_has_no_memory(world, two, client):
    one, _ = two
    one.make("0:kv")
    client.config_set("maxmemory", 1)
    try:
        for _ in range(12):
            world.time += 0.5
            for server in two:
                with contextlib.suppress(StoreError):
                    server.beat()
        assert serving(two, "0:kv") == [0]
        with pytest.raises(StoreError, match="maxmemory"):
            one.change("0:kv", "a")
    finally:
        client.config_set("maxmemory", 0)


def test_writes_that_a_failover_lost_are_found_by_the_next_comparison_that_succeeds(
    world, two, client, monkeypatch
):
    """The first is a request's poll, which compares nothing, and the second fails."""
    one, _ = two
    one.make("0:kv")
    one.change("0:kv", "a")
    client.hset("hm:{0:kv}:head", "seq", 1)
    one.owner._run_id = b"the primary before"
    world.do(one.owner.poll())

    async def broken(*parts):
        raise StoreError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(one.connection, "command", broken)
        with pytest.raises(StoreError):
            one.beat()
    pass_time(world, [one], LEASE + 1.0)
    assert serving(two, "0:kv") == [0]
    assert reserve(one.service, ["b"], now=one.wall()).states == [p.Reserved.FULL]


def test_no_scope_is_taken_for_a_lease_after_a_failover(world, two, client):
    """The replica lacks that the other server has taken the scope, and it still serves it."""
    one, other = two
    one.make("0:kv")
    one.give_back()
    other.beat()
    assert serving(two, "0:kv") == [1]
    one.beat()
    entry = one.owner.entries["0:kv"]
    client.hset("hm:{0:kv}:head", mapping={"token": b"1-older", "owner": b"", "taken": 0})
    world.do(one.owner.publish({"0:kv": msgspec.structs.replace(entry, owner="")}))
    one.owner._run_id = b"the primary before"
    one.beat()
    assert serving(two, "0:kv") == [1]
    other.owner._run_id = b"the primary before"
    pass_time(world, two, LEASE - 0.5)
    assert serving(two, "0:kv") == []
    pass_time(world, two, 1.5)
    assert len(serving(two, "0:kv")) == 1


def test_records_of_ended_servers_are_removed(world, two, client):
    one, other = two
    one.make("0:kv")
    one.paused = True
    pass_time(world, two, LEASE + 1.0)
    assert serving(two, "0:kv") == [1]
    ended = one.owner.incarnation.id
    assert client.hexists("hm:{map}:servers", ended)
    pass_time(world, two, 20 * LEASE)
    assert set(client.hkeys("hm:{map}:servers")) == {other.owner.incarnation.id.encode()}
    assert set(client.hkeys("hm:{map}:statuses")) == {other.owner.incarnation.id.encode()}


def test_a_scope_that_the_map_had_lost_is_not_made_again(world, two, client):
    one, other = two
    one.make("0:kv")
    one.change("0:kv", "a")
    client.hdel("hm:{map}:scopes", "0:kv")
    client.incr("hm:{map}:version")
    other.beat()
    assert not world.do(other.owner.create([p.ScopeGeometry(scope="0:kv", slots=10)], ""))
    other.owner.attach()
    assert other.owner.entries["0:kv"].owner == one.owner.incarnation.id
    pass_time(world, two, 1.0)
    assert serving(two, "0:kv") == [0]


def test_free_scopes_go_to_the_server_with_the_fewest_or_of_their_group():
    free = {"g1": ["a", "b"], "g2": ["c"], "g3": ["d"]}
    x, y, z = (ServerRecord("", 1, LEASE, count, count == 9) for count in (2, 0, 9))
    servers = {"x": x, "y": y, "z": z}
    assert placement(free, servers, {}) == {"g1": "y", "g2": "x", "g3": "y"}
    assert placement(free, servers, {"g1": "x", "g2": "z"}) == {"g1": "x", "g2": "y", "g3": "y"}
    assert set(placement(free, {"z": z}, {}).values()) == {"z"}
    assert placement(free, {}, {}) == {}


class ManyServers(RuleBasedStateMachine):
    """Three servers, three scopes; `redis` is set by the test."""

    redis = None

    def __init__(self):
        super().__init__()
        self.world = World(self.redis)
        self.servers = []
        self.world.check = self.one_serves
        self.keys = 0
        self.acknowledged = {scope: list[str]() for scope in SCOPES}
        clocks = ((0.0, 1 + DRIFT), (86_400.0, 1 - DRIFT), (-86_400.0, 1.0))
        self.servers = [
            Server(self.world, number, offset=offset, rate=rate)
            for number, (offset, rate) in enumerate(clocks)
        ]
        self.servers[0].beat()
        self.servers[0].make("0:kv", "0:mamba")
        self.servers[1].beat()
        self.servers[1].make("1:kv")

    who = st.integers(0, 2)
    some_scope = st.sampled_from(SCOPES)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0, 2.5, 3.0, 10.0]))
    def time_passes(self, seconds):
        self.world.time += seconds

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def all_beat(self, seconds):
        pass_time(self.world, self.servers, seconds)

    @rule(
        who=who,
        scope=some_scope,
        silent=st.sampled_from([0.0, 0.5, 1.5, 2.5]),
        before=st.sampled_from([0.0, 0.25, 1.0, 1.5, 3.0, 4.0]),
        after=st.sampled_from([0.0, 0.25, 1.5, 3.0]),
    )
    def one_beats(self, who, scope, silent, before, after):
        """The owner of a scope, if it has one, after a time in which only the others have."""
        pass_time(self.world, self.servers, 0.25)
        server = self.servers[next(iter(serving(self.servers, scope)), who)]
        others = [one for one in self.servers if one is not server]
        pass_time(self.world, others, silent)
        if not server.paused:
            server.beat(before, after, others)

    @rule(who=who, after=st.sampled_from([1.5, 3.0, 4.0]))
    def an_answer_is_late(self, who, after):
        pass_time(self.world, self.servers, 0.25)
        server = self.servers[who]
        if not server.paused:
            server.beat(0.0, after, [one for one in self.servers if one is not server])

    @rule(who=who)
    def pause(self, who):
        self.servers[who].paused = not self.servers[who].paused

    @rule(who=who, scope=some_scope, later=st.sampled_from([0.0, 1.0, 4.0]), other=who)
    def change(self, who, scope, later, other):
        """It is admitted, and written after a pause in which another server may take the scope."""
        server = self.servers[who]
        if server.paused or not server.owner.serves([scope]):
            return
        self.keys += 1
        key = f"k{self.keys}"
        server.change(scope, key, writes=False)
        if later:
            awake = [one for number, one in enumerate(self.servers) if number == other != who]
            pass_time(self.world, awake, later)
        # Of others that the group has, nothing was acknowledged.
        if server.write():
            self.acknowledged[scope].append(key)

    @rule(who=who)
    def give_back(self, who):
        if not self.servers[who].paused:
            self.servers[who].give_back()

    @rule(who=who)
    def kill(self, who):
        old = self.servers[who]
        self.servers[who] = Server(self.world, who, offset=who * 1e5)
        old.close()

    def one_serves(self):
        for scope in SCOPES:
            found = serving(self.servers, scope)
            assert len(found) <= 1, f"{scope} is served by {found}"

    @invariant()
    def one_serves_and_has_everything(self):
        self.one_serves()
        for scope, keys in self.acknowledged.items():
            for number in serving(self.servers, scope):
                assert self.servers[number].live(scope, keys) == keys

    def teardown(self):
        for server in self.servers:
            server.paused = False
        pass_time(self.world, self.servers, 2 * LEASE)
        # One may be on its way to a server with fewer.
        while not all(serving(self.servers, scope) for scope in SCOPES):
            pass_time(self.world, self.servers, 0.25)
        for scope, keys in self.acknowledged.items():
            (number,) = serving(self.servers, scope)
            assert self.servers[number].live(scope, keys) == keys
            assert list(self.servers[number].service.fsck(p.Fsck(), 0.0))[-1].problems == []
        for server in self.servers:
            server.close()
        self.world.close()


def test_two_never_serve_one_scope_and_nothing_acknowledged_is_lost(redis, monkeypatch):
    class OnThisRedis(ManyServers):
        def __init__(self):
            # The smallest id gets a free scope: drawn anew, a failure would not come again.
            numbers = itertools.count()
            drawn = SimpleNamespace(token_hex=lambda size: f"{next(numbers):0{2 * size}x}")
            monkeypatch.setattr(ownership, "secrets", drawn)
            super().__init__()

    OnThisRedis.redis = redis
    run_state_machine_as_test(
        OnThisRedis,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
