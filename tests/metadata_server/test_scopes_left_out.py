"""Copies and restored backups without scopes that nobody uses any more."""

from __future__ import annotations

import random

import pytest

from hicache_metadata_server.backup.offline import opened_store
from hicache_metadata_server.core.service import MetadataService
from tests.metadata_server.test_snapshots import Engine, address, live, write
from tests.support.commands import run_metadata


@pytest.fixture
def engine():
    """With two scopes that have pages and leases."""
    engine = Engine(MetadataService(), random.Random(7))
    for _ in range(80):
        engine.step()
    return engine


def test_copying_without_a_scope(engine, tmp_path):
    """A client that uses it again gets an empty scope, and leases that were never given."""
    service = engine.service
    gone, stays = sorted(service.scopes)
    write(tmp_path / "a.db", service)
    done = run_metadata(
        "copy", address(tmp_path / "a.db"), address(tmp_path / "b.db"), "--without", gone
    )
    assert done.exit_code == 0, done.output
    expected = {place: page for place, page in live(service).items() if place[0] == stays}
    assert len(expected) < len(live(service))
    assert f"{len(live(service)) - len(expected)} pages left out: scope {gone}" in done.output
    with opened_store(address(tmp_path / "b.db")) as copied:
        assert live(copied) == expected
        assert list(copied.scopes) == [stays]
        assert copied.counters().lease >= service.counters().lease
        [lease] = Engine(copied, random.Random(1), scopes=(gone,), slots=50).reserve(gone, ["new"])
        assert lease >= service.counters().lease
    done = run_metadata(
        "copy",
        address(tmp_path / "a.db"),
        address(tmp_path / "c.db"),
        "--without",
        gone,
        "--without",
        "0:typo",
    )
    assert done.exit_code == 2
    assert "there is no scope 0:typo" in done.output
    assert not (tmp_path / "c.db").exists()


def test_restoring_without_a_scope(engine, tmp_path):
    gone, stays = sorted(engine.service.scopes)
    write(tmp_path / "a.db", engine.service)
    assert run_metadata("backup", address(tmp_path / "a.db"), tmp_path / "b").exit_code == 0
    done = run_metadata(
        "restore", tmp_path / "b", address(tmp_path / "a.db"), "--replace", "--without", gone
    )
    assert done.exit_code == 0, done.output
    with opened_store(address(tmp_path / "a.db")) as restored_store:
        assert list(restored_store.scopes) == [stays]
        assert live(restored_store)
    again = run_metadata(
        "restore", tmp_path / "b", address(tmp_path / "a.db"), "--replace", "--without", "0:typo"
    )
    assert (again.exit_code, "there is no scope 0:typo" in again.output) == (2, True)
    with opened_store(address(tmp_path / "a.db")) as restored_store:
        assert list(restored_store.scopes) == [stays]
