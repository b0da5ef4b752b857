"""Backups of SQLite stores: online, checked, and restored as copies of their file."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import opened_store
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.slot_table import LIVE
from hicache_metadata_server.storage.blocks import SlotBlock
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.full_disks import small_disk
from tests.metadata_server.servers import DURABLE, served
from tests.support.commands import HICACHE, run_metadata

NOW = 1_700_000_000.0


def address(file):
    return f"sqlite:///{file}"


class Engine:
    """Random requests to a service."""

    def __init__(self, service, chance, scopes=("0:kv", "1:kv"), slots=60, keys=80):
        self.service, self.chance, self.keys, self.now = service, chance, keys, NOW
        self.names = scopes
        wanted = [
            p.ScopeGeometry(scope=name, slots=slots, slot_bytes=100, geometry="g", identity="i")
            for name in scopes
        ]
        service.initialize(p.Initialize(scopes=wanted), self.now)

    def step(self):
        chance, name = self.chance, self.chance.choice(self.names)
        keys = [f"k{chance.randrange(self.keys)}" for _ in range(chance.randint(1, 6))]
        match chance.choice(("store",) * 5 + ("hold", "delete", "touch", "wait", "clear")):
            case "store":
                self.commit(name, self.reserve(name, keys))
            case "hold":
                self.reserve(name, keys)
            case "delete":
                self.service.delete(
                    p.Delete(scopes=[p.DeleteScope(scope=name, keys=keys)]), self.now
                )
            case "touch":
                self.service.lookup(
                    p.Lookup(scopes=[p.LookupScope(scope=name, keys=keys)], pin_seconds=3), self.now
                )
            case "wait":
                self.now += chance.choice((0.5, 6, 31))
                self.service.settle(self.now, 1000)
            case "clear" if chance.random() < 0.2:
                self.service.clear(p.Clear(scopes=[name]), self.now)
            case _:
                pass

    def reserve(self, name, keys):
        part = p.ReserveScope(scope=name, keys=keys, prefixes=["", *keys[:-1]])
        return self.service.reserve(p.Reserve(scopes=[part]), self.now).scopes[0].leases

    def commit(self, name, leases):
        held = [lease for lease in leases if lease]
        checksums = [self.chance.getrandbits(64) for _ in held]
        self.service.commit(
            p.Commit(
                scopes=[
                    p.CommitScope(
                        scope=name, leases=held, lengths=[7] * len(held), checksums=checksums
                    )
                ]
            ),
            self.now,
        )


def live(service):
    """Every live page, as clients can see it."""
    found = {}
    for name, scope in service.scopes.items():
        for key in scope.lru:
            [page] = service.inspect(p.Inspect(scope=name, keys=[key]), NOW).slots
            found[name, key] = page.slot, page.generation, page.length, page.checksum, page.prefix
    return found


def write(file, service):
    store = open_store(address(file))
    store.recover(NOW)
    store.write(service.take_changes())
    store.close()


@pytest.fixture
def stored(tmp_path):
    """A store with pages of every kind, some of them without a checksum."""
    engine = Engine(MetadataService(), random.Random(11), slots=200, keys=150)
    engine.now = time.time()
    for _ in range(150):
        engine.step()
    compatible = SglangService(engine.service)
    reserved = compatible.reserve_and_allocate_page_indices(
        0, p.SglangReserve(keys=[("plain1", ""), ("plain2", "plain1")]), engine.now
    )
    slots = [slot for _, slot in reserved["indices"]]
    pairs = list(zip(["plain1", "plain2"], slots, strict=True))
    compatible.confirm_write(0, p.SglangConfirm(written_keys_to_confirm=pairs), engine.now)
    engine.reserve("0:kv", ["held"])
    write(tmp_path / "m.db", engine.service)
    return engine.service


def backed_up(directory, *options):
    return run_metadata(
        "backup", directory / "b.db", "--store", address(directory / "m.db"), *options
    )


def test_a_backup_is_a_store_with_what_readers_can_verify(stored, tmp_path):
    done = backed_up(tmp_path)
    assert done.exit_code == 0, done.output
    [said] = done.output.splitlines()
    assert said.startswith(f"{len(live(stored)) - 2} pages: {tmp_path}/b.db, ")
    assert (tmp_path / "b.db").stat().st_mode & 0o777 == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {"m.db", "m.db.lock", "b.db"}
    assert run_metadata("fsck", "--store", address(tmp_path / "b.db")).exit_code == 0
    wanted = {place: page for place, page in live(stored).items() if page[3]}
    assert len(wanted) == len(live(stored)) - 2
    with opened_store(address(tmp_path / "b.db")) as (service, _):
        assert live(service) == wanted
        assert service._leases.ceiling >= stored._leases.ceiling
    assert "exists already; --replace" in " ".join(backed_up(tmp_path).output.split())
    assert backed_up(tmp_path, "--replace").exit_code == 0


@pytest.mark.parametrize("restore", [shutil.copy, shutil.move])
def test_a_restored_backup_gives_no_slot_that_a_writer_may_still_write(stored, tmp_path, restore):
    """A lease that was given after the backup is unknown to it, until it has ended."""
    assert backed_up(tmp_path).exit_code == 0
    restore(tmp_path / "b.db", tmp_path / "r.db")
    part = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["new"])])
    now = time.time()
    # Also after another restart.
    for _ in range(2):
        store = open_store(address(tmp_path / "r.db"))
        service = MetadataService()
        service.restore(store.recover(now), store.rows, now)
        assert live(service)
        assert service.reserve(part, now).scopes[0].slots == [-1]
        store.close()
    later = now + service.max_hold_seconds + 2
    service.settle(later, 10_000)
    assert service.reserve(part, later).scopes[0].slots != [-1]
    # The original has its inode, and is open at once.
    with opened_store(address(tmp_path / "m.db")) as (service, _):
        assert service.reserve(part, now).scopes[0].slots != [-1]


def test_a_serving_server_is_backed_up(tmp_path):
    with served(DURABLE.replace("{tmp}", str(tmp_path))) as (_, client):
        geometry = p.ScopeGeometry(scope="0:kv", slots=5000, slot_bytes=64)
        client.call("/v2/initialize", p.Initialize(scopes=[geometry]), p.Initialized)

        def store(keys):
            asked = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=keys)])
            leases = client.call("/v2/reserve", asked, p.Leases).scopes[0].leases
            part = p.CommitScope(
                scope="0:kv", leases=leases, lengths=[9] * len(keys), checksums=[7] * len(keys)
            )
            client.call("/v2/commit", p.Commit(scopes=[part]), p.SettledLeases)

        store([f"k{i}" for i in range(500)])
        backups = []
        for number in range(3):
            backups.append(
                subprocess.Popen(
                    [
                        HICACHE,
                        "metadata",
                        "backup",
                        str(tmp_path / f"b{number}"),
                        "--store",
                        address(tmp_path / "m.db"),
                    ]
                )
            )
            for turn in range(20):
                store([f"{number}-{turn}-{i}" for i in range(20)])
        assert [backup.wait(60) for backup in backups] == [0, 0, 0]
    for number in range(3):
        with opened_store(address(tmp_path / f"b{number}")) as (service, _):
            keys = {key for _, key in live(service)}
        turns = [turn for turn in range(60) if f"{turn // 20}-{turn % 20}-0" in keys]
        assert turns == list(range(len(turns))), "all up to some moment"
        assert len(keys) == 500 + 20 * len(turns)
        assert len(turns) >= 20 * number


def test_a_backup_that_fails_leaves_nothing(stored, tmp_path):
    with small_disk(tmp_path) as disk:
        shutil.copy(tmp_path / "m.db", disk.path)
        disk.fill(leave=60_000)
        full = backed_up(disk.path)
        assert (full.exit_code, "is full" in full.output) == (2, True), full.output
        assert {file.name for file in disk.path.iterdir()} == {"m.db", "filler"}


def test_what_contradicts_itself_is_no_part_of_a_backup(stored, tmp_path):
    with closing(sqlite3.connect(tmp_path / "m.db")) as database, database:
        database.execute("DELETE FROM log")
        block = SlotBlock()
        block.states[:2], block.keys[1] = bytes([LIVE, LIVE]), "k"
        block.generations[1] = block.leases[1] = block.checksums[1] = 7
        database.execute(
            "INSERT OR REPLACE INTO scopes VALUES (1, '0:x', 9, 9, '', '', 0, 0, '', '')"
        )
        database.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (1 << 40, block.encode()))
    broken = backed_up(tmp_path)
    assert broken.exit_code == 1, broken.output
    assert "left out: 0:x: slot 0 is live or leased without a key" in broken.output
    assert run_metadata("fsck", "--store", address(tmp_path / "b.db")).exit_code == 0
    with opened_store(address(tmp_path / "b.db")) as (service, _):
        assert list(live(service)) == [("0:x", "k")]


def test_what_is_no_store_is_not_backed_up(tmp_path):
    with closing(sqlite3.connect(tmp_path / "m.db")) as other, other:
        other.execute("CREATE TABLE t (x)")
    done = backed_up(tmp_path)
    assert (done.exit_code, "database of something else" in done.output) == (2, True)
    (tmp_path / "m.db").write_bytes(b"no database at all, but a text of some length" * 50)
    assert backed_up(tmp_path).exit_code == 2
    (tmp_path / "m.db").unlink()
    assert f"there is no store {tmp_path}/m.db" in backed_up(tmp_path).output
    for url in ("redis://:secret@host/0", "memory:", "sqlite:///"):
        done = run_metadata("backup", tmp_path / "b.db", "--store", url)
        assert (done.exit_code, "sqlite:///FILE" in done.output) == (2, True)
        assert "secret" not in done.output
    assert list(tmp_path.iterdir()) == []
