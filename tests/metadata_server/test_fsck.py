"""`hicache metadata fsck`: of servers, and of stores that contradict themselves."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.stores import opened_store
from hicache_metadata_server.core.codec import BLOCK, SlotColumns
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.storage.sqlite import SCOPE_BITS
from tests.metadata_server import servers
from tests.metadata_server.servers import served
from tests.metadata_server.services import NOW, compact_all, opened
from tests.metadata_server.test_backup import address, backed_up, filled, live, write
from tests.support.commands import run_metadata

SERVE = f"{servers.SERVE} --store STORE --quarantine-seconds 0.05"

GEOMETRIES = p.Initialize(
    scopes=[p.ScopeGeometry(scope="0:kv", slots=10), p.ScopeGeometry(scope="1:kv", slots=20)]
)


def fsck(*options):
    done = run_metadata("fsck", *options)
    return done.exit_code, " ".join(done.output.split())


def test_of_a_server_that_runs(tmp_path):
    """MD-OPS-3."""
    store = address(tmp_path / "m.db")
    with served(SERVE.replace("STORE", store)) as (server, client):
        client.call("/v2/initialize", GEOMETRIES, p.Initialized)
        url = ("--url", server.url)
        assert fsck(*url) == (0, "30 slots checked, no problems")
        assert fsck("0:kv", *url) == (0, "10 slots checked, no problems")
        assert fsck("0:other", *url)[0] == 2
        assert fsck("--store", store) == (0, "30 slots checked, no problems")
    assert "checked as a whole" in fsck("0:kv", "--store", store)[1]


# A store that contradicts itself.


SPOILED = {
    90: ("twice", LIVE, {}),
    91: ("twice", LIVE, {}),
    92: ("nonsense", 77, {}),
    93: ("no generation", LIVE, {"generations": 0}),
    94: ("no lease", LIVE, {"leases": 0}),
    95: ("", LIVE, {}),
    96: ("for ever", LEASED, {"until": 1e15}),
    97: ("", QUARANTINED, {"until": 1e15}),
    5000: ("outside", LIVE, {}),
}
SAID = ["91 belongs to the key of slot 90", "92 has the unknown state", "5000 is outside"]
SAID += ["93 is live", "94 is live", "95 is live"]


def spoil(file):
    """Write slots into a store that no server would write."""
    store, service = opened(file.parent)
    compact_all(store, service)
    store.close()
    with closing(sqlite3.connect(file)) as database, database:
        query = "SELECT number, epoch FROM scopes WHERE name = '0:kv'"
        number, epoch = database.execute(query).fetchone()
        for slot, (key, state, columns) in SPOILED.items():
            row = {"keys": key, "states": state, "generations": 3, "leases": 9000 + slot}
            row |= {"epochs": epoch, "lengths": 7, "checksums": 7, **columns}
            place = number << SCOPE_BITS | slot // BLOCK
            found = database.execute(
                "SELECT slots FROM blocks WHERE place = ?", (place,)
            ).fetchone()
            block = SlotColumns.decode(found[0]) if found else SlotColumns()
            for name, value in row.items():
                getattr(block, name)[slot % BLOCK] = value
            values = place, block.encode()
            database.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", values)


def test_a_store_that_contradicts_itself_is_mended_by_a_start(tmp_path):
    service = filled(random.Random(4), NOW, slots=100, size=20, steps=60)
    write(tmp_path / "m.db", service)
    before = live(service)
    spoil(tmp_path / "m.db")
    store = address(tmp_path / "m.db")
    status, told = fsck("--store", store)
    # No invariant is violated once these slots are left out.
    assert (status, f"slots checked, {len(SAID)} problems" in told) == (1, True), told
    assert [said for said in SAID if f"slot {said}" not in told] == []
    status, told = backed_up(tmp_path)
    assert (status, "a start leaves out: 0:kv: slot 91 belongs to" in told) == (1, True), told
    assert fsck("--store", address(tmp_path / "b.db"))[0] == 1
    with opened_store(store) as (service, _):
        assert live(service) == {**before, ("0:kv", "twice"): (90, 3, 7, 7, "")}
        scope = service.scopes["0:kv"]
        lost = list(range(91, 98))
        assert not {scope.table.states[slot] for slot in lost} & {LIVE}
        # A lease ends first, and then rests.
        for seconds in (service.max_hold_seconds, 2 * service.max_hold_seconds):
            scope.settle(time.time() + seconds + 1, 10_000)
        returned = {scope.table.states[slot] for slot in lost if slot < len(scope.table)}
        assert returned == {FREE}, "lost slots return"
