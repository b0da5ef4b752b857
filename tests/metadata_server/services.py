"""A service on a store, without a network: requests of its clients, and what they would see."""

from __future__ import annotations

import os

from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.storage.sqlite import open_store

NOW, QUARANTINE = 1_700_000_000.0, DEFAULTS.quarantine_seconds
STRANGE = ["a\x00b", "a", "ключ", "\U0001f5dd", "x" * 1024, " ", "'; DROP TABLE slots; --", "\x7f"]


def restored(store, now=NOW, limits=DEFAULTS):
    """A service with what its store has kept."""
    service = MetadataService(limits, durability=store.durability)
    service.restore(store.recover(now), store.rows, now)
    return service


def opened(directory, now=NOW, **options):
    store = open_store(f"sqlite:///{directory}/m.db", **options)
    return store, restored(store, now)


def killed(store):
    """Leave a store as kill -9 does, whose lock the kernel releases."""
    os.close(store.lock)


def compact_all(store, service):
    while store.wants_compaction(idle=True):
        store.compact(store.collect(service.scope_of), NOW)


def state(service, now=NOW):
    """State that clients can see: scopes, and answers by their idempotency key."""
    scopes = [
        (
            (name, scope.tenant, scope.lru.slots(STRANGE)),
            [scope.status(slot, now) for slot in range(len(scope.table))],
        )
        for name, scope in sorted(service.scopes.items())
    ]
    return scopes, {
        once: structs.replace(answer, until=answer.until - now, scope="")
        for once, answer in service.answers._kept.items()
        if answer.until > now
    }


def initialize(service, *names, slots=1000, now=NOW, **options):
    parts = [p.ScopeGeometry(scope=name, slots=slots, identity="me") for name in names]
    return service.initialize(p.Initialize(scopes=parts, **options), now).created


def reserve(service, keys, scope="0:kv", now=NOW, prefixes=(), **options):
    part = p.ReserveScope(scope=scope, keys=list(keys), prefixes=list(prefixes))
    return service.reserve(p.Reserve(scopes=[part], owner="me", **options), now).scopes[0]


def checksum(lease):
    """Checksum of the page that `commit` stores: it needs all 64 bits."""
    return 2**64 - 1 - lease


def commit(service, leases, scope="0:kv", now=NOW):
    part = p.CommitScope(
        scope=scope,
        leases=leases,
        lengths=[7] * len(leases),
        checksums=list(map(checksum, leases)),
    )
    return service.commit(p.Commit(scopes=[part]), now).scopes[0].states


def store(service, keys, scope="0:kv", now=NOW):
    """Reserve and commit new keys; returns their leases."""
    given = reserve(service, keys, scope, now)
    assert set(commit(service, given.leases, scope, now)) == {p.Settled.DONE}
    return given


def lookup(service, keys, scope="0:kv", now=NOW):
    part = p.LookupScope(scope=scope, keys=list(keys))
    return service.lookup(p.Lookup(scopes=[part]), now).scopes[0]


def delete(service, keys, scope="0:kv", now=NOW):
    part = p.DeleteScope(scope=scope, keys=list(keys))
    return service.delete(p.Delete(scopes=[part]), now).scopes[0].done


def clear(service, scope="0:kv", now=NOW):
    service.clear(p.Clear(scopes=[scope]), now)


def drop(service, scope="0:kv", now=NOW):
    service.drop(p.Drop(scopes=[scope]), now)


def slot_status(service, slot, now=NOW):
    return service.inspect(p.Inspect(scope="0:kv", slots=[slot]), now).slots[0]


def numbered(number):
    """A key; the first ones are strange."""
    return STRANGE[number] if number < len(STRANGE) else f"k{number}"


def random_changes(chance, service, scope, now, *, size, batch):
    """Reserve, and perhaps commit, delete and clear; an answer is remembered."""
    keys = [numbered(chance.randrange(size * 3 // 2)) for _ in range(batch)]
    prefixes = [numbered(chance.randrange(size)) for _ in range(batch)]
    given = reserve(service, keys, scope, now, prefixes if chance.random() < 0.5 else ())
    if chance.random() < 0.8:
        commit(service, [lease for lease in given.leases if lease], scope, now)
    if chance.random() < 0.3:
        delete(service, keys[: batch // 2], scope, now)
    if chance.random() < 0.05:
        clear(service, scope, now)
    once, kind = f"once {chance.random()}", p.MSGPACK
    service.answers.add(AnswerRecord(once, now + 9.0, b"digest", kind, 200, b"\x00body", scope))


def write_and_compact(chance, store, service, now=NOW, *, write=None, compact=None):
    """Write what has changed, and perhaps compact, or begin to."""
    write = write or store.write
    compact = compact or (lambda batch: store.compact(batch, now))
    changes, batch = service.take_changes(), None
    if store.wants_compaction(idle=True) and chance.random() < 0.6:
        batch = store.collect(service.scope_of)
    write(changes)
    if batch is not None and chance.random() < 0.8:
        compact(batch)
    elif batch is not None:
        store.put_back(batch)


def check_restored(before, after, seconds=0.0):
    """A state came back: all pages, leases and answers, whose ends differ by so many seconds at
    most."""
    (scopes, answers), (scopes_again, found) = before, after
    assert answers.keys() == found.keys()
    for once, answer in answers.items():
        assert structs.replace(answer, until=found[once].until) == found[once]
        assert abs(answer.until - found[once].until) <= seconds
    for (scope, slots), (again, restored) in zip(scopes, scopes_again, strict=True):
        assert scope == again
        assert [slot.generation for slot in slots] == [slot.generation for slot in restored]
        for slot, same in zip(slots, restored, strict=True):
            if slot.state is p.SlotState.QUARANTINED:
                # A restart knows when a lease has ended, and not when its server has seen that.
                late = same.seconds_left - slot.seconds_left
                longest = max(0.0, QUARANTINE - slot.seconds_left)
                assert -QUARANTINE - seconds <= late <= longest + seconds
            if {slot.state, same.state} & {p.SlotState.LIVE, p.SlotState.LEASED}:
                assert abs(slot.seconds_left - same.seconds_left) <= seconds
                assert structs.replace(slot, seconds_left=0.0) == structs.replace(
                    same, seconds_left=0.0
                )
