"""Backups of SQLite stores, restored as copies of their file; `fsck` of servers and of stores."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.stores import opened_store
from hicache_metadata_server.core.codec import BLOCK, SlotColumns
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.storage.sqlite import SCOPE_BITS, open_store
from tests.metadata_server import services
from tests.metadata_server.full_disks import small_disk
from tests.metadata_server.servers import DURABLE, RemoteService, served
from tests.metadata_server.services import NOW, compact_all, opened
from tests.support.commands import HICACHE, run_metadata


def address(file):
    return f"sqlite:///{file}"


def live(service):
    """Every live page, as clients can see it."""
    found = {}
    for name, scope in service.scopes.items():
        for key in scope.lru:
            [page] = service.inspect(p.Inspect(scope=name, keys=[key]), NOW).slots
            found[name, key] = page.slot, page.generation, page.length, page.checksum, page.prefix
    return found


@pytest.fixture
def stored(tmp_path):
    """A store with pages of every kind, some of them without a checksum."""
    now, chance, service = time.time(), random.Random(11), MetadataService()
    services.initialize(service, "0:kv", "1:kv", slots=200, now=now - 150)
    for at in range(-150, 0):
        scope = chance.choice(("0:kv", "1:kv"))
        services.random_changes(chance, service, scope, now + at, size=100, batch=6)
        service.settle(now + at, 10**6)
    sglang, plain = SglangService(service), ["plain1", "plain2"]
    asked = p.SglangReserve(keys=[(key, "") for key in plain])
    given = sglang.reserve_and_allocate_page_indices(0, asked, now)["indices"]
    pairs = [(key, slot) for key, (_, slot) in zip(plain, given, strict=True)]
    sglang.confirm_write(0, p.SglangConfirm(written_keys_to_confirm=pairs), now)
    services.reserve(service, ["held"], now=now)
    with closing(open_store(address(tmp_path / "m.db"))) as store:
        store.recover(now)
        store.write(service.take_changes())
    return service


def backed_up(directory, *options):
    store = address(directory / "m.db")
    done = run_metadata("backup", directory / "b.db", "--store", store, *options)
    return done.exit_code, " ".join(done.output.split())


def test_a_backup_is_a_store_with_what_readers_can_verify(stored, tmp_path):
    pages = len(live(stored)) - 2
    status, told = backed_up(tmp_path)
    assert (status, told.startswith(f"{pages} pages: {tmp_path}/b.db, ")) == (0, True), told
    assert (tmp_path / "b.db").stat().st_mode & 0o777 == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {"m.db", "b.db"}
    wanted = {place: page for place, page in live(stored).items() if page[3]}
    assert len(wanted) == pages
    with opened_store(address(tmp_path / "b.db")) as (service, _):
        assert live(service) == wanted
    assert "exists already; --replace" in backed_up(tmp_path)[1]
    assert backed_up(tmp_path, "--replace")[0] == 0


@pytest.mark.parametrize("restore", [shutil.copy, shutil.move])
def test_a_restored_backup_gives_no_slot_that_a_writer_may_still_write(stored, tmp_path, restore):
    """A lease that was given after the backup is unknown to it, until it has ended."""
    assert backed_up(tmp_path)[0] == 0
    content = (tmp_path / "b.db").read_bytes()
    assert fsck(tmp_path / "b.db") == (0, "400 slots checked, no problems")
    assert (tmp_path / "b.db").read_bytes() == content
    restore(tmp_path / "b.db", tmp_path / "r.db")
    now = time.time()
    # Also after another restart.
    for _ in range(2):
        with closing(open_store(address(tmp_path / "r.db"))) as store:
            service = services.restored(store, now)
            assert live(service)
            assert services.reserve(service, ["new"], now=now).slots == [-1]
    later = now + service.max_hold_seconds + 2
    service.settle(later, 10_000)
    given = services.reserve(service, ["new"], now=later)
    assert given.slots != [-1]
    assert given.leases >= services.reserve(stored, ["new"], now=later).leases, "numbers go on"
    # The original has its inode, and is open at once.
    with opened_store(address(tmp_path / "m.db")) as (service, _):
        assert services.reserve(service, ["new"], now=now).slots != [-1]


def test_a_serving_server_is_backed_up(tmp_path):
    store = address(tmp_path / "m.db")
    with served(DURABLE.replace("{tmp}", str(tmp_path))) as (_, client):
        service = RemoteService(client)
        services.initialize(service, "0:kv", slots=5000)
        services.store(service, [f"k{i}" for i in range(500)])
        backups = []
        for number in range(3):
            command = [HICACHE, "metadata", "backup", tmp_path / f"b{number}", "--store", store]
            backups.append(subprocess.Popen(command))
            for turn in range(20):
                services.store(service, [f"{number}-{turn}-{i}" for i in range(20)])
        assert [backup.wait(60) for backup in backups] == [0, 0, 0]
        assert fsck(tmp_path / "m.db") == (0, "5,000 slots checked, no problems")
    for number in range(3):
        with opened_store(address(tmp_path / f"b{number}")) as (service, _):
            keys = {key for _, key in live(service)}
        turns = [turn for turn in range(60) if f"{turn // 20}-{turn % 20}-0" in keys]
        assert turns == list(range(len(turns))), "all up to some moment"
        assert len(keys) == 500 + 20 * len(turns)
        assert len(turns) >= 20 * number
    for file in tmp_path.glob("m.db*"):
        file.unlink()
    shutil.copy(tmp_path / "b2", tmp_path / "m.db")
    with served(DURABLE.replace("{tmp}", str(tmp_path))) as (place, _):
        told = run_metadata("status", "--url", place.url)
        assert (told.exit_code, told.output.endswith("ready\n")) == (0, True)
        seconds = re.search("1 scopes give no slot for ([0-9]+) s", told.output)
        found = msgspec.json.decode(run_metadata("status", "--json", "--url", place.url).output)
        # The longest lease of this server is ten of its usual ones.
        assert 10 < found["closed_seconds"] <= int(seconds[1]) + 1 <= 33


def test_a_backup_that_fails_leaves_nothing(stored, tmp_path):
    with small_disk(tmp_path) as disk:
        shutil.copy(tmp_path / "m.db", disk.path)
        disk.fill(leave=60_000)
        status, told = backed_up(disk.path)
        assert (status, "is full" in told) == (2, True), told
        assert {file.name for file in disk.path.iterdir()} == {"m.db", "filler"}


def test_what_is_no_store_is_not_backed_up(tmp_path):
    with closing(sqlite3.connect(tmp_path / "m.db")) as other, other:
        other.execute("CREATE TABLE t (x)")
    assert "database of something else" in backed_up(tmp_path)[1]
    (tmp_path / "m.db").write_bytes(b"no database at all, but a text of some length" * 50)
    assert backed_up(tmp_path)[0] == 2
    (tmp_path / "m.db").unlink()
    assert f"there is no store {tmp_path}/m.db" in backed_up(tmp_path)[1]
    for url in ("redis://:secret@host/0", "memory:", "sqlite:///"):
        done = run_metadata("backup", tmp_path / "b.db", "--store", url)
        assert (done.exit_code, "sqlite:///FILE" in done.output) == (2, True)
        assert "secret" not in done.output
    assert list(tmp_path.iterdir()) == []


# A store that contradicts itself.


def fsck(file):
    done = run_metadata("fsck", "--store", address(file))
    return done.exit_code, " ".join(done.output.split())


SPOILED = {
    190: ("twice", LIVE, {}),
    191: ("twice", LIVE, {}),
    192: ("nonsense", 77, {}),
    193: ("no generation", LIVE, {"generations": 0}),
    194: ("no lease", LIVE, {"leases": 0}),
    195: ("", LIVE, {}),
    196: ("for ever", LEASED, {"until": 1e15}),
    197: ("", QUARANTINED, {"until": 1e15}),
    5000: ("outside", LIVE, {}),
}
SAID = ["191 belongs to the key of slot 190", "192 has the unknown state", "5000 is outside"]
SAID += ["193 is live", "194 is live", "195 is live"]


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


def test_a_store_that_contradicts_itself_is_mended_by_a_start(stored, tmp_path):
    before = live(stored)
    spoil(tmp_path / "m.db")
    status, told = fsck(tmp_path / "m.db")
    # No invariant is violated once these slots are left out.
    assert (status, f"slots checked, {len(SAID)} problems" in told) == (1, True), told
    assert [said for said in SAID if f"slot {said}" not in told] == []
    status, told = backed_up(tmp_path)
    assert (status, "a start leaves out: 0:kv: slot 191 belongs to" in told) == (1, True), told
    assert fsck(tmp_path / "b.db")[0] == 1
    with opened_store(address(tmp_path / "m.db")) as (service, _):
        assert live(service) == {**before, ("0:kv", "twice"): (190, 3, 7, 7, "")}
        scope = service.scopes["0:kv"]
        lost = list(range(191, 198))
        assert not {scope.table.states[slot] for slot in lost} & {LIVE}
        # A lease ends first, and then rests.
        for seconds in (service.max_hold_seconds, 2 * service.max_hold_seconds):
            scope.settle(time.time() + seconds + 1, 10_000)
        returned = {scope.table.states[slot] for slot in lost if slot < len(scope.table)}
        assert returned == {FREE}, "lost slots return"
