"""Stores: durability, recovery, refused files."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing, contextmanager

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.storage import sqlite
from hicache_metadata_server.storage import store as stores
from tests.metadata_server.services import (
    NOW,
    check_restored,
    clear,
    commit,
    compact_all,
    delete,
    initialize,
    killed,
    opened,
    random_changes,
    reserve,
    slot_status,
    state,
    write_and_compact,
)
from tests.support.commands import run_python

STRANGE = ["a\x00b", "a", "ключ", "\U0001f5dd", "x" * 1024, " ", "'; DROP TABLE slots; --", "\x7f"]


@contextmanager
def database(directory):
    """The file of a store as another program opens it."""
    with closing(sqlite3.connect(directory / "m.db")) as one, one:
        yield one


def logged(directory):
    """Groups that are not compacted."""
    with database(directory) as one:
        return one.execute("SELECT count(*) FROM log").fetchone()[0]


@pytest.mark.parametrize("compacted", [False, True])
def test_everything_comes_back(tmp_path, compacted):
    store, service = opened(tmp_path)
    initialize(service, "0:kv", "1:kv")
    commit(service, reserve(service, STRANGE, prefixes=["", *STRANGE[:-1]]).leases)
    held = reserve(service, ["held"])
    commit(service, reserve(service, ["a"], "1:kv").leases, "1:kv")
    slot = service.scopes["0:kv"].slot_of("a")
    delete(service, ["a"])
    service.answers.add(AnswerRecord("once", NOW + 9, b"digest", p.MSGPACK, 200, b"\x00body"))
    service.scopes["1:kv"].tenant = "acme"
    store.write(service.take_changes())
    if compacted:
        compact_all(store, service)
    before = state(service)
    killed(store)
    again, service = opened(tmp_path)
    assert state(service) == before
    assert service.recovery_problems == []
    assert [service.scopes[name].tenant for name in ("0:kv", "1:kv")] == ["", "acme"]
    assert service.answers.find("once", b"digest", NOW).body == b"\x00body"
    assert commit(service, held.leases) == [p.Settled.DONE]
    assert min(reserve(service, ["new"]).leases) > max(held.leases)
    for seconds, wanted in ((4, p.SlotState.QUARANTINED), (6, p.SlotState.FREE)):
        service.settle(NOW + seconds, 1000)
        assert slot_status(service, slot, now=NOW + seconds).state is wanted
    again.close()


def test_a_cleared_scope_stays_cleared(tmp_path):
    store, service = opened(tmp_path)
    initialize(service, "0:kv", slots=5000)
    given = reserve(service, [f"k{i}" for i in range(4000)])
    commit(service, given.leases)
    store.write(service.take_changes())
    clear(service)
    changes = service.take_changes()
    assert not changes.slots, "a clear writes one row, however much it clears"
    store.write(changes)
    store.close()
    store, service = opened(tmp_path, NOW + 1)
    status = service.list_scopes().scopes[0]
    assert (status.live, status.quarantined, status.free) == (0, 4000, 1000)
    service.settle(NOW + 6, 10**5)
    assert service.list_scopes().scopes[0].free == 5000
    again = reserve(service, ["x"], now=NOW + 6)
    assert again.generations[0] > max(given.generations)
    store.close()


@pytest.mark.parametrize(("size", "batch"), [(20, 4), (300, 60)])
def test_random_histories_come_back_exactly(tmp_path, monkeypatch, size, batch):
    """Killed after every few groups, compacted or half compacted; in one block and in several."""
    monkeypatch.setattr(sqlite, "BATCH_BLOCKS", 1)
    monkeypatch.setattr(stores, "WINDOW_BYTES", 2000)
    chance, now = random.Random(5), NOW
    store, service = opened(tmp_path)
    initialize(service, "0:kv", "0:mamba", slots=size)
    store.write(service.take_changes())
    for _ in range(150):
        scope = chance.choice(("0:kv", "0:mamba"))
        random_changes(chance, service, scope, now, size=size, batch=batch)
        write_and_compact(chance, store, service, now)
        now += chance.choice((0.0, 1.0, 3.0))
        if chance.random() < 0.2:
            service.settle(now, 10**5)
            before = state(service, now)
            killed(store)
            store, service = opened(tmp_path, now)
            check_restored(before, state(service, now))
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


DAMAGED = [b"", b"\x90", msgspec.msgpack.encode([b"", *[b"x"] * 6, [], [], {}])]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("PRAGMA application_id = 7", "database of something else"),
        ("PRAGMA user_version = 99", "later version"),
        (
            "PRAGMA user_version = 6",
            r"earlier version of this server \(schema 6;.*: delete it, and",
        ),
        *((f"UPDATE blocks SET slots = x'{blob.hex()}'", "cannot be read") for blob in DAMAGED),
        ("INSERT INTO log VALUES (1, x'6e6f')", "cannot be read"),
    ],
)
def test_a_store_that_cannot_be_read_is_refused_and_stays(tmp_path, statement, said):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    reserve(service, ["a"])
    store.write(service.take_changes())
    compact_all(store, service)
    store.close()
    with database(tmp_path) as one:
        one.execute(statement)
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


def test_what_is_compacted_leaves_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "WINDOW_BYTES", 500)
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    most, chance = 0, random.Random(0)
    for i in range(200):
        reserve(service, [f"k{i}"])
        write_and_compact(chance, store, service, NOW)
        most = max(most, logged(tmp_path))
    assert most < 20
    compact_all(store, service)
    assert logged(tmp_path) == 0
    store.close()
    assert {file.name for file in tmp_path.iterdir()} == {"m.db"}
    store, service = opened(tmp_path)
    assert [slot.key for slot in state(service)[0][1]] == [f"k{i}" for i in range(200)]
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


def test_a_program_that_closes_the_database_leaves_its_log(tmp_path):
    """The last program to close a database deletes its log. One that took itself for the last, as
    the server had lost its locks, would leave the server writing into a deleted file."""
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    program = (
        "import sqlite3, sys; one = sqlite3.connect(sys.argv[1]); one.execute('SELECT * FROM log')"
    )
    run_python(f"{program}.fetchall(); one.close()", tmp_path / "m.db")
    reserve(service, ["a"])
    store.write(service.take_changes())
    (tmp_path / "as-killed").mkdir()
    for file in tmp_path.glob("m.db*"):
        shutil.copy(file, tmp_path / "as-killed")
    again, service = opened(tmp_path / "as-killed")
    assert service.scopes["0:kv"].table.keys == ["a"]
    again.close()
    store.close()
