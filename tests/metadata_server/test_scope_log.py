"""Logs of scopes in Redis: what comes back after a change of owner, and what is fenced."""

from __future__ import annotations

import asyncio
import random

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import FencedError, StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.shared import scope_log
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.scope_log import (
    ScopeLog,
    ScopeLogStore,
    load,
    log_of,
    read_head,
    restored,
    scope_keys,
    take,
)
from hicache_metadata_server.storage import store as stores
from tests.metadata_server.services import (
    NOW,
    check_restored,
    commit,
    drop,
    initialize,
    random_changes,
    reserve,
    state,
    write_and_compact,
)


@pytest.fixture(autouse=True)
def _empty(client):
    client.flushall()


class Owner:
    """A server with its own clock, `ahead` of the others'."""

    def __init__(self, redis, name, *, ahead=0.0):
        self.redis, self.name, self.now = redis, name, NOW + ahead
        self.runner, self.connection = asyncio.Runner(), RedisConnection(redis.url)
        self.store = ScopeLogStore(self.connection, lambda: self.now)
        self.service = MetadataService(
            DEFAULTS, durability=p.StoreDurability.PROCESS, shares_store=True
        )

    def do(self, coroutine):
        return self.runner.run(coroutine)

    def make(self, scope, *, slots=1000):
        """Create a scope."""
        token, head = self.do(take(self.connection, scope, b"", self.name))
        assert token
        initialize(self.service, scope, slots=slots)
        self.store.attach(ScopeLog(scope, self.service.scopes[scope].number, token, head.seq, 0.0))
        self.write()

    def take(self, scope):
        """Take a scope from its owner."""
        expected = self.do(read_head(self.connection, scope)).token
        token, head = self.do(take(self.connection, scope, expected, self.name))
        assert token, head
        log = log_of(scope, self.service.new_number(), token, head, self.now)
        loaded = self.do(load(self.connection, scope, token))
        found, again = restored(self.service, log, loaded, self.now)
        self.service.adopt(again, found)
        self.store.attach(log)

    def append(self, changes):
        self.do(self.store.append(changes))

    def replace(self, batch):
        self.do(self.store.replace_blocks(batch, self.now))

    def write(self):
        changes = self.service.take_changes()
        try:
            self.append(changes)
        except StoreError:
            self.service.put_back(changes)
            raise

    def compact(self):
        while self.store.wants_compaction(idle=True):
            self.replace(self.store.collect(self.service.scope_of))

    def close(self):
        self.do(self.connection.close())
        self.runner.close()


@pytest.fixture
def owner(redis):
    made = list[Owner]()

    def new(name, **options):
        made.append(Owner(redis, name, **options))
        return made[-1]

    yield new
    for one in made:
        one.close()


def test_an_owner_that_was_replaced_writes_nothing(owner, monkeypatch):
    monkeypatch.setattr(scope_log, "IDLE_LOG_BYTES", 0)
    one, other, third = owner("one"), owner("other"), owner("third")
    one.make("0:kv")
    one.make("1:kv")
    commit(one.service, reserve(one.service, ["kept"]).leases)
    one.write()
    batch = one.store.collect(one.service.scope_of)
    other.take("0:kv")
    before = state(other.service)
    reserve(one.service, ["late"])
    reserve(one.service, ["else"], "1:kv")
    with pytest.raises(FencedError) as fenced:
        one.write()
    assert fenced.value.scopes == ["0:kv"]
    with pytest.raises(FencedError):
        one.replace(batch)
    number = one.service.scopes["0:kv"].number
    one.service.release("0:kv")
    one.store.detach(number)
    # What belongs to the other scope is written with the next group.
    one.write()
    third.take("0:kv")
    assert state(third.service) == before
    third.take("1:kv")
    assert third.service.scopes["1:kv"].slot_of("else") >= 0


def test_a_delayed_write_does_not_overwrite_a_later_one(owner):
    """Redis may execute a write whose answer was given up for lost."""
    one, other = owner("one"), owner("other")
    one.make("0:kv")
    leases = reserve(one.service, ["a"]).leases
    sent, connection = [], one.connection

    async def lose(calls):
        sent.extend(calls)
        raise StoreError("no answer")

    run, connection.run = connection.run, lose
    with pytest.raises(StoreError, match="no answer"):
        one.write()
    connection.run = run
    commit(one.service, leases)
    one.write()
    assert one.do(run(sent)) == [b"LATE"]
    other.take("0:kv")
    assert other.service.scopes["0:kv"].lru.slots(["a"]) == [0]


def test_a_takeover_that_a_failover_has_lost_is_found(owner, client):
    """The replica has the scope as an earlier owner left it, and somebody takes it again."""
    one, other, third = owner("one"), owner("other"), owner("third")
    one.make("0:kv")
    older = client.hgetall("hm:{0:kv}:head")
    other.take("0:kv")
    reserve(other.service, ["a"])
    other.write()
    client.delete("hm:{0:kv}:head")
    client.hset("hm:{0:kv}:head", mapping=older)
    client.xtrim("hm:{0:kv}:log", maxlen=1)
    third.take("0:kv")
    assert third.store.logs()[0].token != other.store.logs()[0].token
    # All that the first wrote is there; what the second wrote is lost.
    for behind, lost in ((other, {"0:kv"}), (one, set())):
        reserve(behind.service, ["b"])
        with pytest.raises(FencedError):
            behind.write()
        assert behind.store.lost == lost


def test_nothing_is_read_where_the_take_is_unknown(owner, client):
    """A connection may still lead to the primary before a failover."""
    one = owner("one")
    one.make("0:kv")
    client.hset("hm:{0:kv}:head", "token", "1-of-the-old-primary")
    with pytest.raises(FencedError):
        one.do(load(one.connection, "0:kv", one.store.logs()[0].token))


def test_a_log_begins_with_the_scope(owner, client):
    """Entries behind a missing first one could not be read again."""
    one = owner("one")
    one.make("0:kv")
    log = one.store.detach(one.service.scopes["0:kv"].number)
    client.flushall()
    token, head = one.do(take(one.connection, "0:kv", b"", "one"))
    one.store.attach(ScopeLog("0:kv", log.number, token, head.seq, 0.0))
    reserve(one.service, ["a"])
    with pytest.raises(FencedError):
        one.write()
    assert not client.exists("hm:{0:kv}:log")


def test_changes_of_a_scope_that_was_detached_meanwhile_are_refused(owner):
    one = owner("one")
    one.make("0:kv")
    one.make("1:kv")
    reserve(one.service, ["a"])
    reserve(one.service, ["a"], "1:kv")
    changes = one.service.take_changes()
    one.store.detach(one.service.scopes["0:kv"].number)
    one.service.release("0:kv")
    with pytest.raises(FencedError):
        one.append(changes)
    one.service.put_back(changes)
    one.write()
    assert not one.service.take_changes()


def test_a_dropped_scope_leaves_no_key(owner, client, monkeypatch):
    monkeypatch.setattr(scope_log, "IDLE_LOG_BYTES", 0)
    one = owner("one")
    one.make("0:kv")
    one.compact()
    assert client.exists(*scope_keys("0:kv")) == 3
    drop(one.service)
    one.write()
    assert client.keys() == []
    assert one.store.logs() == []


@pytest.mark.parametrize("damaged", ["hm:{0:kv}:blocks", "hm:{0:kv}:rest"])
def test_a_damaged_snapshot_is_refused(owner, client, monkeypatch, damaged):
    monkeypatch.setattr(scope_log, "IDLE_LOG_BYTES", 0)
    one, other = owner("one"), owner("other")
    one.make("0:kv")
    reserve(one.service, ["a"])
    one.write()
    one.compact()
    client.hset(damaged, "0", b"nothing")
    with pytest.raises(StoreError, match="scope 0:kv cannot be read"):
        other.take("0:kv")


@pytest.mark.parametrize(("size", "batch"), [(20, 4), (300, 60)])
def test_random_histories_come_back_exactly(owner, monkeypatch, size, batch, client):
    """The owner changes after every few groups, compacted or half compacted, and with it the clock."""
    monkeypatch.setattr(scope_log, "IDLE_LOG_BYTES", 0)
    monkeypatch.setattr(scope_log, "BATCH_BLOCKS", 1)
    monkeypatch.setattr(scope_log, "PAGE_GROUPS", 5)
    monkeypatch.setattr(stores, "WINDOW_BYTES", 2000)
    chance, scopes = random.Random(5), ("0:kv", "0:mamba")
    one = owner("one")
    for scope in scopes:
        one.make(scope, slots=size)
    for _ in range(150):
        service = one.service
        random_changes(chance, service, chance.choice(scopes), one.now, size=size, batch=batch)
        write_and_compact(chance, one.store, service, write=one.append, compact=one.replace)
        one.now += chance.choice((0.0, 1.0, 3.0))
        if chance.random() < 0.2:
            service.settle(one.now, 10**5)
            # A last write, so that the scope's time is that of this owner.
            for name in scopes:
                service.describe(p.Describe(scope=name, model=f"m{one.now}"), one.now)
            one.write()
            before = state(service, one.now)
            one = owner("another", ahead=chance.uniform(-1e6, 1e6))
            for name in scopes:
                one.take(name)
            assert one.service.recovery_problems == []
            check_restored(before, state(one.service, one.now), seconds=1e-3)
    assert client.xlen("hm:{0:kv}:log") < 100


@pytest.mark.parametrize(
    ("writes", "read"), [(scope_log.READS - 1, True), (scope_log.READS, False)]
)
def test_a_scope_that_its_server_changes_meanwhile_is_read_again(owner, monkeypatch, writes, read):
    one = owner("one")
    one.make("0:kv")
    left = writes

    async def load_and_write(*parts):
        nonlocal left
        loaded = await load(*parts)
        if left:
            left -= 1
            reserve(one.service, [f"k{left}"])
            await one.store.append(one.service.take_changes())
        return loaded

    monkeypatch.setattr(scope_log, "load", load_and_write)
    reading = scope_log.load_unchanged(one.connection, "0:kv")
    if read:
        head, loaded = one.do(reading)
        assert len(loaded.groups) == head.seq == 1 + writes
    else:
        with pytest.raises(StoreError, match="a server changes scope 0:kv"):
            one.do(reading)
