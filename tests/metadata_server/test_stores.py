"""Stores: durability, recovery, refused files."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.slot_table import LIVE
from hicache_metadata_server.storage import compaction, sqlite
from hicache_metadata_server.storage.blocks import SlotBlock
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.full_disks import small_disk

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


def logged(tmp_path):
    """Groups that are not compacted."""
    with closing(sqlite3.connect(tmp_path / "m.db")) as database:
        return database.execute("SELECT count(*) FROM log").fetchone()[0]


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
    monkeypatch.setattr(compaction, "REPLAY_BYTES", 3000)
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


def test_a_group_that_cannot_be_written_leaves_nothing(tmp_path):
    with small_disk(tmp_path) as disk:
        store, service = opened(disk.path)
        initialize(service, "0:kv")
        store.write(service.take_changes())
        initialize(service, "1:kv")
        reserve(service, [f"k{i}" for i in range(200)], "1:kv")
        service.answers.add(AnswerRecord("once", NOW + 9, b"", p.JSON, 200, b""))
        changes = service.take_changes()
        disk.fill()
        with pytest.raises(StoreError, match=r"cannot be written.*is full; free space in"):
            store.write(changes)
        disk.empty()
        service.put_back(changes)
        changes = service.take_changes()
        assert [record.geometry.scope for record in changes.scopes] == ["1:kv"]
        assert changes.answers == []
        store.write(changes)
        store.close()
        store, restored = opened(disk.path)
        assert list(restored.scopes) == ["0:kv", "1:kv"]
        assert restored.answers.find("once", b"", NOW) is None
        store.close()


def test_a_log_without_its_database_does_no_harm(tmp_path):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    left = (tmp_path / "m.db-wal").read_bytes()
    store.close()
    (tmp_path / "m.db").unlink()
    (tmp_path / "m.db-wal").write_bytes(left)
    store, service = opened(tmp_path)
    assert service.scopes == {}
    store.close()


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
    [(99, "later version"), (5, r"earlier version of this server \(schema 5;.*: delete it, and")],
    ids=["later", "earlier"],
)
def test_another_schema_is_refused(tmp_path, schema, said):
    opened(tmp_path)[0].close()
    database = sqlite3.connect(tmp_path / "m.db")
    database.execute(f"PRAGMA user_version = {schema}")
    database.commit()
    database.close()
    before = (tmp_path / "m.db").read_bytes()
    with pytest.raises(StoreError, match=said):
        opened(tmp_path)
    assert (tmp_path / "m.db").read_bytes() == before


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


@pytest.mark.parametrize(
    ("durability", "level"), [(p.StoreDurability.PROCESS, 1), (p.StoreDurability.MACHINE, 2)]
)
def test_durability_is_what_reaches_the_disk(tmp_path, durability, level):
    """What that means for an acknowledged change is in `test_power_cuts.py`."""
    store, service = opened(tmp_path, durability=durability)
    assert store._database.execute("PRAGMA synchronous").fetchone() == (level,)
    assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store.is_quick == (durability is p.StoreDurability.PROCESS)
    assert service.about.durability is durability
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


def test_what_is_compacted_leaves_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "WINDOW_BYTES", 500)
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    most = 0
    for i in range(200):
        reserve(service, [f"k{i}"])
        changes = service.take_changes()
        compaction_batch = (
            store.collect(service.scope_of) if store.wants_compaction(idle=True) else None
        )
        store.write(changes)
        if compaction_batch is not None:
            store.compact(compaction_batch, NOW)
        most = max(most, logged(tmp_path))
    assert most < 10
    compact_all(store, service)
    assert logged(tmp_path) == 0
    store.close()
    assert {file.name for file in tmp_path.iterdir()} == {"m.db", "m.db.lock"}
    store, restored = opened(tmp_path)
    assert [slot.key for slot in state(restored, NOW)[0][1]] == [f"k{i}" for i in range(200)]
    store.close()


def test_another_program_may_read_the_database(tmp_path):
    """Then SQLite keeps its own log, also when the store is closed."""
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    with closing(sqlite3.connect(tmp_path / "m.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM scopes").fetchall()
        reserve(service, ["a"])
        store.write(service.take_changes())
        compact_all(store, service)
        store.close()
        store, service = opened(tmp_path)
        assert service.scopes["0:kv"].table.keys == ["a"]
        store.close()
    assert not (tmp_path / "m.db-wal").exists()


def test_a_damaged_group_is_refused_and_stays(tmp_path):
    opened(tmp_path)[0].close()
    with closing(sqlite3.connect(tmp_path / "m.db")) as database, database:
        database.execute("INSERT INTO log VALUES (1, ?)", (b"no group",))
    store = open_store(address(tmp_path))
    with pytest.raises(StoreError, match="cannot be read"):
        store.recover(NOW)
    store.close()
    assert logged(tmp_path) == 1
