"""Stores: durability, recovery, refused files."""

from __future__ import annotations

import os
import random
import sqlite3
from functools import partial

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.slot_table import LIVE
from hicache_metadata_server.storage import compaction, replay, sqlite, wal
from hicache_metadata_server.storage.blocks import SlotBlock
from hicache_metadata_server.storage.factory import open_store

NOW = 1_700_000_000.0
STRANGE = [
    "a\x00b",
    "a",
    "ключ",
    "\U0001f5dd",
    "x" * 1024,
    " ",
    "'; DROP TABLE slots; --",
    "\x7f\x01",
]


def address(tmp_path):
    return f"sqlite:///{tmp_path}/m.db"


def opened(tmp_path, now=NOW, **options):
    store = open_store(address(tmp_path), **options)
    service = MetadataService(DEFAULTS, durability=store.durability)
    service.restore(store.recover(now), store.rows, now)
    return store, service


def compact_all(store, service):
    while store.wants_compaction(idle=True):
        store.compact(store.collect(service.scope_of), NOW)


def refuse(*_):
    raise OSError(5, "Input/output error")


def state(service, now):
    """State that clients can see."""
    return [
        (
            name,
            [scope.status(slot, now) for slot in range(len(scope.table))],
            scope.lru.slots(["a", "b"]),
        )
        for name, scope in sorted(service.scopes.items())
    ]


def reserve(service, keys, scope="0:kv", now=NOW, prefixes=()):
    part = p.ReserveScope(scope=scope, keys=keys, prefixes=list(prefixes))
    return service.reserve(p.Reserve(scopes=[part], owner="me"), now).scopes[0]


def commit(service, leases, scope="0:kv", now=NOW):
    part = p.CommitScope(
        scope=scope,
        leases=leases,
        lengths=[7] * len(leases),
        checksums=[2**64 - 1 - lease for lease in leases],
    )
    return service.commit(p.Commit(scopes=[part]), now)


def initialize(service, *names, slots=1000):
    service.initialize(
        p.Initialize(
            scopes=[p.ScopeGeometry(scope=name, slots=slots, identity="me") for name in names]
        ),
        NOW,
    )


@pytest.mark.parametrize("compacted", [False, True])
def test_everything_comes_back(tmp_path, compacted):
    store, service = opened(tmp_path)
    initialize(service, "0:kv", "1:kv")
    commit(service, reserve(service, STRANGE, prefixes=["", *STRANGE[:-1]]).leases)
    held = reserve(service, ["held"])
    commit(service, reserve(service, ["a"], "1:kv").leases, "1:kv")
    pinned = service.lookup(
        p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=["a"])], pin_seconds=9), NOW
    )
    service.delete(p.Delete(scopes=[p.DeleteScope(scope="0:kv", keys=["a"])]), NOW)
    service.answers.add(AnswerRecord("once", NOW + 9, b"digest", p.MSGPACK, 200, b"\x00body"))
    store.write(service.take_changes())
    if compacted:
        compact_all(store, service)
    before = state(service, NOW)
    # Not closed: as after kill -9, but for the lock.
    store._lock.release()
    again, restored = opened(tmp_path)
    assert state(restored, NOW) == before
    assert restored.recovery_problems == []
    assert restored.answers.find("once", b"digest", NOW).body == b"\x00body"
    assert commit(restored, held.leases).scopes[0].states == [p.Settled.DONE]
    assert min(reserve(restored, ["new"]).leases) > max(held.leases)
    slot = pinned.scopes[0].slots[0]
    assert restored.inspect(p.Inspect(scope="0:kv", slots=[slot]), NOW).slots[0].pins == 1
    restored.settle(NOW + 8, 1000)
    assert (
        restored.inspect(p.Inspect(scope="0:kv", slots=[slot]), NOW + 8).slots[0].state
        is p.SlotState.QUARANTINED
    )
    restored.settle(NOW + 10, 1000)
    assert (
        restored.inspect(p.Inspect(scope="0:kv", slots=[slot]), NOW + 10).slots[0].state
        is p.SlotState.FREE
    )
    again.close()


def test_a_cleared_scope_stays_cleared(tmp_path):
    store, service = opened(tmp_path)
    initialize(service, "0:kv", slots=5000)
    keys = [f"k{i}" for i in range(4000)]
    generations = reserve(service, keys)
    commit(service, generations.leases)
    store.write(service.take_changes())
    service.clear(p.Clear(scopes=["0:kv"]), NOW)
    changes = service.take_changes()
    assert not changes.slots, "a clear writes one row, however much it clears"
    store.write(changes)
    store.close()
    store, restored = opened(tmp_path, NOW + 1)
    status = restored.list_scopes().scopes[0]
    assert (status.live, status.quarantined, status.free) == (0, 4000, 1000)
    restored.settle(NOW + 6, 10**5)
    assert restored.list_scopes().scopes[0].free == 5000
    again = reserve(restored, ["x"], now=NOW + 6)
    assert again.generations[0] > max(generations.generations)
    store.close()


@pytest.mark.parametrize(("size", "batch"), [(20, 4), (300, 60)])
def test_random_histories_come_back_exactly(tmp_path, monkeypatch, size, batch):
    """Killed after every few groups, compacted or half compacted; in one block and in several."""
    monkeypatch.setattr(sqlite, "BATCH_BLOCKS", 1)
    monkeypatch.setattr(compaction, "WINDOW_BYTES", 2000)
    monkeypatch.setattr(replay, "BYTES", 3000)
    chance, now = random.Random(5), NOW
    store, service = opened(tmp_path)
    initialize(service, "0:kv", "0:mamba", slots=size)
    store.write(service.take_changes())
    for _ in range(150):
        scope = chance.choice(("0:kv", "0:mamba"))
        keys = [f"k{chance.randrange(size * 3 // 2)}" for _ in range(batch)]
        prefixes = (
            [f"k{chance.randrange(size)}" for _ in range(batch)] if chance.random() < 0.5 else ()
        )
        leases = [lease for lease in reserve(service, keys, scope, now, prefixes).leases if lease]
        if chance.random() < 0.8:
            commit(service, leases, scope, now)
        if chance.random() < 0.3:
            service.delete(
                p.Delete(scopes=[p.DeleteScope(scope=scope, keys=keys[: batch // 2])]), now
            )
        if chance.random() < 0.05:
            service.clear(p.Clear(scopes=[scope]), now)
        changes = service.take_changes()
        compaction_batch = (
            store.collect(service.scope_of)
            if store.wants_compaction(idle=True) and chance.random() < 0.6
            else None
        )
        store.write(changes)
        if compaction_batch is not None and chance.random() < 0.8:
            store.compact(compaction_batch, now)
        elif compaction_batch is not None:
            store.put_back(compaction_batch)
        now += chance.choice((0.0, 1.0, 3.0))
        if chance.random() < 0.2:
            service.settle(now, 10**5)
            before = state(service, now)
            store._lock.release()
            store, service = opened(tmp_path, now)
            for (name, slots, live), (other, restored, alive) in zip(
                before, state(service, now), strict=True
            ):
                assert (name, live) == (other, alive)
                assert [slot for slot in slots if slot.state in ("live", "leased")] == [
                    slot for slot in restored if slot.state in ("live", "leased")
                ]
                assert [slot.generation for slot in slots] == [slot.generation for slot in restored]
    store.close()


@pytest.mark.parametrize("can_be_taken_away", [True, False])
def test_a_group_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, can_be_taken_away):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    initialize(service, "1:kv")
    service.answers.add(AnswerRecord("once", NOW + 9, b"", p.JSON, 200, b""))
    changes = service.take_changes()
    with monkeypatch.context() as full:
        # A disk that takes a part of it.
        full.setattr(
            wal.os,
            "write",
            lambda descriptor, record, write=os.write: write(descriptor, record[:-9]),
        )
        if not can_be_taken_away:
            full.setattr(wal.os, "ftruncate", refuse)
        with pytest.raises(StoreError, match=r"cannot be written.*No space left"):
            store.write(changes)
    service.put_back(changes)
    changes = service.take_changes()
    assert [record.geometry.scope for record in changes.scopes] == ["1:kv"]
    assert changes.answers == []
    store.write(changes)
    store.close()
    store, restored = opened(tmp_path)
    assert list(restored.scopes) == ["0:kv", "1:kv"]
    assert restored.answers.find("once", b"", NOW) is None
    store.close()


def test_a_database_that_was_replaced_does_not_take_the_log(tmp_path):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    store._lock.release()
    (tmp_path / "m.db").unlink()
    with pytest.raises(
        StoreError, match="is the log of another database: bring that back, or remove the log"
    ):
        opened(tmp_path)


def test_a_second_server_is_refused(tmp_path):
    store, _ = opened(tmp_path)
    with pytest.raises(
        StoreError, match=r"another server has this store: .*m\.db\.lock is locked by process \d+"
    ):
        opened(tmp_path)
    store.close()
    opened(tmp_path)[0].close()


def test_other_databases_are_left_alone(tmp_path):
    file = tmp_path / "m.db"
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.close()
    with pytest.raises(StoreError, match="database of something else"):
        opened(tmp_path)
    assert sqlite3.connect(file).execute("SELECT name FROM sqlite_master").fetchall() == [
        ("bookmarks",)
    ]


@pytest.mark.parametrize(
    ("schema", "said"),
    [(99, "later version"), (1, r"earlier version of this server \(schema 1;")],
    ids=["later", "earlier"],
)
def test_another_schema_is_refused(tmp_path, schema, said):
    opened(tmp_path)[0].close()
    database = sqlite3.connect(tmp_path / "m.db")
    database.execute(f"PRAGMA user_version = {schema}")
    database.commit()
    database.close()
    with pytest.raises(StoreError, match=said):
        opened(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"not a database at all, but long enough to look at" * 50,
        b"SQLite format 3\x00" + b"x" * 5000,
    ],
)
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    (tmp_path / "m.db").write_bytes(content)
    with pytest.raises(StoreError, match="cannot open"):
        opened(tmp_path)


def test_durability_is_what_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(wal.os, "fdatasync", synced.append)
    for durability in (p.StoreDurability.PROCESS, p.StoreDurability.MACHINE):
        store, service = opened(tmp_path, durability=durability)
        assert store._database.execute("PRAGMA synchronous").fetchone() == (1,), (
            "what is compacted waits for a checkpoint"
        )
        assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store.is_quick == (durability is p.StoreDurability.PROCESS)
        assert service.about.durability is durability
        initialize(service, f"{len(service.scopes)}:kv")
        store.write(service.take_changes())
        assert len(synced) == (durability is p.StoreDurability.MACHINE)
        store.close()


def test_rows_that_contradict_each_other_are_left_out(tmp_path):
    store, service = opened(tmp_path)
    initialize(service, "0:kv", slots=8)
    commit(service, reserve(service, ["a", "b", "c"]).leases)
    store.write(service.take_changes())
    compact_all(store, service)
    store.close()
    database = sqlite3.connect(tmp_path / "m.db")
    place, blob = database.execute("SELECT place, slots FROM blocks").fetchone()
    block, far = SlotBlock.decode(blob), SlotBlock()
    block.keys[1], block.states[2] = "a", 9
    far.states[0], far.keys[0] = LIVE, "z"
    for number, changed in ((place, block), (place + 1000, far)):
        database.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (number, changed.encode()))
    database.commit()
    database.close()
    store, restored = opened(tmp_path)
    assert len(restored.recovery_problems) == 3
    assert restored.lookup(
        p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=["a", "b", "c"])]), NOW
    ).scopes[0].slots == [
        0,
        -1,
        -1,
    ]
    assert list(restored.fsck(p.Fsck()))[-1].problems == []
    store.close()


@pytest.mark.parametrize(
    "blob", [b"", b"\x90", msgspec.msgpack.encode([b"", *[b"x"] * 6, [], [], {}])]
)
def test_a_damaged_block_is_refused(tmp_path, blob):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    reserve(service, ["a"])
    store.write(service.take_changes())
    compact_all(store, service)
    store.close()
    database = sqlite3.connect(tmp_path / "m.db")
    database.execute("UPDATE blocks SET slots = ?", (blob,))
    database.commit()
    database.close()
    with pytest.raises(StoreError, match="cannot be read"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://x", "is not the address of a store"),
        ("redis://x", "servers share"),
        ("sqlite:///", "is not the address of a store"),
        ("", "is not the address of a store"),
    ],
)
def test_addresses_that_name_no_store(url, said):
    with pytest.raises(ValueError, match=said):
        open_store(url)


def test_a_store_in_no_directory(tmp_path):
    with pytest.raises(StoreError, match=r"there is no directory .*nowhere: make it"):
        open_store(f"sqlite:///{tmp_path}/nowhere/m.db")


def test_what_is_compacted_and_on_the_disk_leaves_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "CHECKPOINT_BLOCKS", 5)
    monkeypatch.setattr(compaction, "WINDOW_BYTES", 500)
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 1000)
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    files, most = set(), 0
    for i in range(200):
        reserve(service, [f"k{i}"])
        changes = service.take_changes()
        compaction_batch = (
            store.collect(service.scope_of) if store.wants_compaction(idle=True) else None
        )
        store.write(changes)
        if compaction_batch is not None:
            store.compact(compaction_batch, NOW)
        if store.wants_checkpoint(idle=False):
            store.checkpoint()
        now = set(tmp_path.glob("m.db.log-*"))
        files, most = files | now, max(most, len(now))
    assert len(files) > 20
    assert most < 10
    compact_all(store, service)
    store.close()
    assert not list(tmp_path.glob("m.db.log-*")), "only the database remains"
    store, restored = opened(tmp_path)
    assert [slot.key for slot in state(restored, NOW)[0][1]] == [f"k{i}" for i in range(200)]
    store.close()


def test_no_log_is_deleted_before_the_disk_has_what_it_says(tmp_path, monkeypatch):
    """A checkpoint that others keep from being whole leaves the log."""
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 100)
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    reserve(service, ["a"])
    store.write(service.take_changes())
    reserve(service, ["b"])
    store.write(service.take_changes())
    reader = sqlite3.connect(tmp_path / "m.db")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM blocks").fetchall()
    compact_all(store, service)
    before = sorted(tmp_path.glob("m.db.log-*"))
    store.checkpoint()
    assert sorted(tmp_path.glob("m.db.log-*")) == before
    reader.close()
    store.checkpoint()
    assert len(list(tmp_path.glob("m.db.log-*"))) < len(before)
    store.close()


def test_a_log_that_cannot_be_settled_is_not_appended_to(tmp_path, monkeypatch):
    """While another program reads the database, compacted blocks do not reach it; a log that went
    on would follow nothing."""
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    store._lock.release()
    reader = sqlite3.connect(tmp_path / "m.db")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM scopes").fetchall()
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.01))
    store = open_store(address(tmp_path))
    with pytest.raises(StoreError, match="another program is reading the database"):
        store.recover(NOW)
    store.close()
    assert list(tmp_path.glob("m.db.log-*")), "what the disk may not have is gone"
    reader.close()
    store, service = opened(tmp_path)
    assert list(service.scopes) == ["0:kv"]
    assert not list(tmp_path.glob("m.db.log-*"))
    store.close()


def test_a_damaged_group_is_refused(tmp_path):
    store, _ = opened(tmp_path)
    store._log.append(1, b"no group")
    store._lock.release()
    with pytest.raises(StoreError, match="cannot be read"):
        opened(tmp_path)
