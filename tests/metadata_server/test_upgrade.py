"""A server of another version on the same store: what it finds after an update.
`data/last-release.zip` is the state machine and the store of the last release, or of a commit
before there is one.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import run_python

RELEASE = Path(__file__).with_name("data") / "last-release.zip"
"""git archive --format=zip -9 -o tests/metadata_server/data/last-release.zip TAG \\
metadata_server/hicache_metadata_server/{__init__.py,core,protocol.py,storage}"""

SESSION = """
import json, os, sys, time
import hicache_metadata_server
from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.storage.sqlite import SqliteStore

directory, name, before, lease, killed = json.loads(sys.argv[1])
try:
    store, now = SqliteStore(f"{directory}/m.db"), time.time()
except StoreError as error:
    sys.exit(print(json.dumps([str(error), hicache_metadata_server.__file__])))
service = MetadataService(DEFAULTS, durability=store.durability)
service.restore(store.recover(now), store.rows, now)
assert service.recovery_problems == []
if not before:
    scope = p.ScopeGeometry(scope="0:kv", slots=1000, slot_bytes=64, identity="i", geometry="g")
    service.initialize(p.Initialize(scopes=[scope]), now)
    service.describe(p.Describe(scope="0:kv", model="org/model"), now)
else:
    held = p.CommitScope(scope="0:kv", leases=[lease], lengths=[7], checksums=[2**64 - 1])
    assert service.commit(p.Commit(scopes=[held]), now).scopes[0].states == [p.Settled.DONE]
assert [scope.table.prefixes[scope.slot_of(f"{name}{i}")] for scope in service.scopes.values()
        for name in before for i in range(99)] == [
    prefix for name in before for prefix in ["other", *(f"{name}{i}" for i in range(98))]
]
keys = [f"{name}{i}" for name in before for i in range(100)]
# Versions with pins leave theirs in the store.
pin = {"pin_seconds": 60.0} if "pin_seconds" in p.Lookup.__struct_fields__ else {}
asked = p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=keys)], **pin)
(found,) = service.lookup(asked, now).scopes
assert -1 not in found.slots and set(found.lengths) <= {7}
assert set(found.checksums) <= {2**64 - 1}
(status,) = service.list_scopes().scopes
assert (status.identity, status.geometry, status.model) == ("i", "g", "org/model")
new = [f"{name}{i}" for i in range(100)]
new = p.ReserveScope(scope="0:kv", keys=new, prefixes=["other", *new[:-1]])
(given,) = service.reserve(p.Reserve(scopes=[new]), now).scopes
done = p.CommitScope(
    scope="0:kv", leases=given.leases[:99], lengths=[7] * 99, checksums=[2**64 - 1] * 99
)
service.commit(p.Commit(scopes=[done]), now)
store.write(service.take_changes())
print(json.dumps([given.leases[99], hicache_metadata_server.__file__]), flush=True)
if killed:
    os._exit(0)
while store.wants_compaction(idle=True):
    store.compact(store.collect(service.scope_of), now)
store.close()
"""
"""Open the store, find all pages of the sessions before, commit the lease of the last one, write a
hundred pages, each named as prefix by the next, and hold the lease of one."""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "closed"])
def test_an_upgrade_to_this_version(tmp_path, killed):
    """A store of the last release serves this version, and as the schema is the same, that one
    again."""
    with zipfile.ZipFile(RELEASE) as archive:
        assert len(archive.comment) == 40, "git has put the commit there"
    lease, before = 0, list[str]()
    for name, is_old in (("a", True), ("b", True), ("c", False), ("d", False), ("e", True)):
        path = {"PYTHONPATH": f"{RELEASE}/metadata_server"} if is_old else {}
        done = run_python(SESSION, json.dumps([str(tmp_path), name, before, lease, killed]), **path)
        lease, file = json.loads(done.stdout)
        assert (RELEASE.name in file) == is_old
        before.append(name)
