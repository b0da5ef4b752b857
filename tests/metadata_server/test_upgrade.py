"""A server of another version on the same store: what it finds after an update, and after the way back.

`data/store-schema-4.tar.gz` was written by the server before scopes could be dropped, and left as by kill -9: a database, and a log
that is not folded.
"""

from __future__ import annotations

import sqlite3
import tarfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.service.changes import AnswerRecord, PinRecord
from hicache_metadata_server.service.limits import DEFAULTS
from hicache_metadata_server.service.service import MetadataService
from hicache_metadata_server.state.written import SlotChanges
from hicache_metadata_server.stores.schema import VERSION
from hicache_metadata_server.stores.store import open_store

BEFORE = Path(__file__).with_name("data") / "store-schema-4.tar.gz"
NOW = 1_700_000_000.0
"""When it was written."""


@dataclass
class ScopeOfThen:
    """A scope's record as the version before reads it."""

    number: int
    geometry: p.ScopeGeometry
    epoch: int = 0
    cleared_until: float = 0.0
    tenant: str = ""


@dataclass
class ChangesOfThen:
    """A group of the log as the version before reads it."""

    scopes: list[ScopeOfThen] = field(default_factory=list[ScopeOfThen])
    slots: dict[int, SlotChanges] = field(default_factory=dict[int, SlotChanges])
    pins: list[PinRecord] = field(default_factory=list[PinRecord])
    unpinned: list[int] = field(default_factory=list[int])
    answers: list[AnswerRecord] = field(default_factory=list[AnswerRecord])
    counters: dict[str, int] = field(default_factory=dict[str, int])


def opened(directory, now=NOW + 200):
    store = open_store(f"sqlite:///{directory}/m.db")
    service = MetadataService(DEFAULTS, durability=store.durability)
    service.restore(store.recover(now), store.rows, now)
    return store, service


def found(service, scope, keys):
    asked = p.Lookup(scopes=[p.LookupScope(scope=scope, keys=keys)])
    return [slot >= 0 for slot in service.lookup(asked, NOW + 200).scopes[0].slots]


def test_an_update_finds_everything_that_was_acknowledged(tmp_path):
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    assert list(tmp_path.glob("m.db.log-*")), "a part of it is in the log alone"
    store, service = opened(tmp_path)
    assert service.recovery_problems == []
    assert found(service, "0:logged", [f"k{i}" for i in range(30)]) == [True] * 30
    assert found(service, "0:folded", ["after", "k0"]) == [True, False], "it was cleared, and written again"
    held = p.Commit(scopes=[p.CommitScope(scope="0:logged", leases=[102], lengths=[7], checksums=[9])])
    assert service.commit(held, NOW + 200).scopes[0].states == [p.Settled.DONE]
    assert list(service.fsck(p.Fsck()))[-1].problems == []
    store.write(service.take_changes())
    store.close()
    store, service = opened(tmp_path)
    assert found(service, "0:logged", ["held"]) == [True]
    store.close()


def test_the_way_back_reads_what_this_version_writes(tmp_path):
    """No newer schema and no newer log: the version before knows no dropped scopes, finds them empty, and loses nothing else."""
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    with closing(sqlite3.connect(tmp_path / "m.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (VERSION,), (
            "a newer schema has no way back: say so in release.md"
        )
        tables = database.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    store, service = opened(tmp_path)
    service.initialize(p.Initialize(scopes=[p.ScopeGeometry(scope="0:new", slots=8)]), NOW)
    service.drop(p.Drop(scopes=["0:new"]), NOW)
    changes = service.take_changes()
    store.write(changes)
    then = msgspec.msgpack.decode(msgspec.msgpack.encode(changes), type=ChangesOfThen)
    assert changes.dropped
    assert (then.slots, then.pins, then.counters) == (changes.slots, changes.pins, changes.counters)
    store.close()
    with closing(sqlite3.connect(tmp_path / "m.db")) as database:
        assert database.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall() == tables
