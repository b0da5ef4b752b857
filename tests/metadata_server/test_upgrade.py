"""A server of another version on the same store: what it finds after an update, and after the way
back.

`data/store-schema-4.tar.gz` was written by the server before scopes could be dropped, and left as
by kill -9: a database, and a log that is not folded.
"""

from __future__ import annotations

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.storage import sqlite
from hicache_metadata_server.storage.factory import open_store
from hicache_metadata_server.storage.schema import VERSION

BEFORE = Path(__file__).with_name("data") / "store-schema-4.tar.gz"
NOW = 1_700_000_000.0
"""When it was written."""


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
    assert found(service, "0:folded", ["after", "k0"]) == [True, False], (
        "it was cleared, and written again"
    )
    held = p.Commit(
        scopes=[p.CommitScope(scope="0:logged", leases=[102], lengths=[7], checksums=[9])]
    )
    assert service.commit(held, NOW + 200).scopes[0].states == [p.Settled.DONE]
    assert list(service.fsck(p.Fsck()))[-1].problems == []
    store.write(service.take_changes())
    store.close()
    store, service = opened(tmp_path)
    assert found(service, "0:logged", ["held"]) == [True]
    store.close()


def columns(database):
    return database.execute(
        "SELECT name, type, \"notnull\", dflt_value FROM pragma_table_info('scopes')"
    ).fetchall()


def test_an_update_gives_scopes_a_place_for_their_model(tmp_path):
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    with closing(sqlite3.connect(tmp_path / "m.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (4,)
    store, service = opened(tmp_path)
    assert {scope.model for scope in service.scopes.values()} == {""}
    service.describe(p.Describe(scope="0:logged", model="org/model"), NOW + 200)
    store.write(service.take_changes())
    store.close()
    # Out of the log first, then out of the database.
    for _ in range(2):
        store, service = opened(tmp_path)
        assert service.scopes["0:logged"].model == "org/model"
        assert found(service, "0:logged", ["k0"]) == [True]
        store.close()
    (tmp_path / "new").mkdir()
    opened(tmp_path / "new")[0].close()
    with (
        closing(sqlite3.connect(tmp_path / "m.db")) as old,
        closing(sqlite3.connect(tmp_path / "new" / "m.db")) as new,
    ):
        assert old.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert columns(old) == columns(new)


def test_there_is_no_way_back(tmp_path, monkeypatch):
    """The version before refuses the store, and leaves it as it is."""
    opened(tmp_path)[0].close()
    before = (tmp_path / "m.db").read_bytes()
    monkeypatch.setattr(sqlite, "VERSION", 4)
    with pytest.raises(
        StoreError, match=f"later version of this server .schema {VERSION}; this one knows 4"
    ):
        opened(tmp_path)
    assert (tmp_path / "m.db").read_bytes() == before
