"""Copies, backups and what becomes of them."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.backup import remote
from hicache_metadata_server.backup.backup_file import BackupFile, write_backup
from hicache_metadata_server.backup.filters import LEAP, restored, verifiable
from hicache_metadata_server.backup.frames import BackupHeader
from hicache_metadata_server.backup.offline import opened_store, snapshot_of
from hicache_metadata_server.backup.remote import RemoteSource
from hicache_metadata_server.backup.target import fill, open_target
from hicache_metadata_server.core.errors import RequestError, SnapshotError, StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.slot_table import LEASED
from hicache_metadata_server.core.snapshot_parts import Pages, Tally
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.histories import problems_of
from tests.metadata_server.http_calls import running
from tests.metadata_server.servers import DURABLE, served
from tests.support.commands import run_metadata

NOW = 1_700_000_000.0
ORIGIN = BackupHeader("sqlite:///m.db", NOW, False)


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


def leased(scope):
    return {slot for slot, state in enumerate(scope.table.states) if state == LEASED}


def pages_in(parts):
    """The same of a snapshot."""
    found, name = {}, ""
    for part in parts:
        if isinstance(part, Pages):
            rows = zip(
                part.keys,
                part.slots,
                part.generations,
                part.lengths,
                part.checksums,
                part.prefixes,
                strict=True,
            )
            for key, *page in rows:
                assert (name, key) not in found, "a key stands twice"
                found[name, key] = tuple(page)
        elif hasattr(part, "geometry"):
            name = part.geometry.scope
    return found


def write(file, service):
    store = open_store(address(file))
    store.recover(NOW)
    store.write(service.take_changes())
    store.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 120))
def test_a_copy_has_the_pages_and_goes_on_growing(seed, steps, tmp_path_factory):
    directory = tmp_path_factory.mktemp("copy")
    engine = Engine(MetadataService(), random.Random(seed))
    for _ in range(steps):
        engine.step()
    service = engine.service
    with closing(open_target(address(directory / "b.db"), replace=False)) as target:
        fill(target, snapshot_of(service, engine.now))
        target.commit()
    store = open_store(address(directory / "b.db"))
    copied = MetadataService()
    copied.restore(store.recover(engine.now), store.rows, engine.now)
    store.close()
    assert copied.recovery_problems == []
    assert live(copied) == live(service)
    for name, scope in service.scopes.items():
        other = copied.scopes[name]
        assert problems_of(other) == []
        assert other.geometry == scope.geometry
        assert list(other.table.generations) == list(scope.table.generations)
        assert not leased(other)
        # The next that are given have never been given.
        leases = Engine(copied, random.Random(1), scopes=(name,), slots=60).reserve(
            name, [f"new{i}" for i in range(60)]
        )
        assert all(lease >= service.counters().lease for lease in leases if lease)
        held = leased(scope)
        assert held.isdisjoint(leased(other)), "an old writer may still write there"
    copied.settle(engine.now + DEFAULTS.max_lease_seconds, 10_000)
    for name, scope in service.scopes.items():
        assert all(copied.scopes[name].table.states[slot] == 0 for slot in leased(scope))


def test_copying_by_the_command(tmp_path):
    engine = Engine(MetadataService(), random.Random(7))
    for _ in range(80):
        engine.step()
    write(tmp_path / "a.db", engine.service)
    done = run_metadata("copy", address(tmp_path / "a.db"), address(tmp_path / "b.db"))
    assert done.exit_code == 0, done.output
    assert "pages in 2 scopes: copied and verified" in done.output
    with opened_store(address(tmp_path / "b.db")) as copied:
        assert live(copied) == live(engine.service)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.db", "a.db.lock", "b.db", "b.db.lock"]
    again = run_metadata("copy", address(tmp_path / "a.db"), address(tmp_path / "b.db"))
    assert again.exit_code == 2
    assert "holds scopes already" in again.output
    assert (
        run_metadata(
            "copy", address(tmp_path / "a.db"), address(tmp_path / "b.db"), "--replace"
        ).exit_code
        == 0
    )
    assert run_metadata("fsck", "--store", address(tmp_path / "b.db")).exit_code == 0


def test_what_is_no_target(tmp_path):
    write(tmp_path / "a.db", Engine(MetadataService(), random.Random(7)).service)
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as other:
        other.execute("CREATE TABLE t (x)")
        other.commit()
    before = (tmp_path / "foreign.db").read_bytes()
    (tmp_path / "text.db").write_text("no database at all, but a text of some length")
    for target, said in (
        ("foreign.db", "a database of something else"),
        ("text.db", "is no store"),
        ("nowhere/x.db", "No such file"),
    ):
        done = run_metadata(
            "copy", address(tmp_path / "a.db"), address(tmp_path / target), "--replace"
        )
        assert (done.exit_code, said in " ".join(done.output.split())) == (2, True), done.output
    assert (tmp_path / "foreign.db").read_bytes() == before
    assert (
        "is not the address of a store that can be filled"
        in run_metadata("copy", address(tmp_path / "a.db"), "http://x").output
    )
    assert (
        "nothing is kept in memory"
        in run_metadata("copy", "memory:", address(tmp_path / "new.db")).output
    )
    assert (
        "there is no store"
        in run_metadata("copy", address(tmp_path / "typo.db"), address(tmp_path / "new.db")).output
    )
    assert not (tmp_path / "typo.db").exists()
    # A store whose scopes are only in its log yet.
    held = open_store(address(tmp_path / "held.db"))
    held.recover(NOW)
    held.write(Engine(MetadataService(), random.Random(1)).service.take_changes())
    assert (
        "another server has this store"
        in run_metadata("copy", address(tmp_path / "a.db"), address(tmp_path / "held.db")).output
    )
    held.close()
    assert (
        "holds scopes already"
        in run_metadata("copy", address(tmp_path / "a.db"), address(tmp_path / "held.db")).output
    )


def test_what_fails_leaves_the_target_as_it_was(tmp_path, monkeypatch):
    write(tmp_path / "a.db", Engine(MetadataService(), random.Random(7)).service)
    with opened_store(address(tmp_path / "a.db")) as service:
        before = live(service)
    broken = snapshot_of(Engine(MetadataService(), random.Random(3)).service, NOW)

    def parts():
        yield next(broken)
        raise SnapshotError("the source fails")

    with (
        closing(open_target(address(tmp_path / "a.db"), replace=True)) as target,
        pytest.raises(SnapshotError),
    ):
        fill(target, parts())
    twice = [Pages([0, 1], [1, 1], [1, 2], [7, 7], [7, 7], ["k", "k"], ["", ""])]
    head = next(snapshot_of(Engine(MetadataService(), random.Random(3)).service, NOW))
    with (
        closing(open_target(address(tmp_path / "a.db"), replace=True)) as target,
        pytest.raises(SnapshotError, match="belongs to the key of slot"),
    ):
        fill(target, [head, *twice])
    with opened_store(address(tmp_path / "a.db")) as service:
        assert live(service) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db", "a.db.lock"]


# Backups.


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store with pages of every kind, and its backup."""
    directory = tmp_path_factory.mktemp("stored")
    engine = Engine(MetadataService(), random.Random(11), slots=200, keys=150)
    for _ in range(150):
        engine.step()
    # As the compatible part writes them.
    compatible = SglangService(engine.service)
    reserved = compatible.reserve_and_allocate_page_indices(
        0, p.SglangReserve(keys=[("plain1", ""), ("plain2", "plain1")]), engine.now
    )
    slots = [slot for _, slot in reserved["indices"]]
    pairs = list(zip(["plain1", "plain2"], slots, strict=True))
    compatible.confirm_write(0, p.SglangConfirm(written_keys_to_confirm=pairs), engine.now)
    engine.reserve("0:kv", ["held"])
    write(directory / "m.db", engine.service)
    done = run_metadata("backup", address(directory / "m.db"), directory / "m.backup")
    assert done.exit_code == 0, done.output
    return SimpleNamespace(directory=directory, service=engine.service, file=directory / "m.backup")


def test_a_backup_says_what_the_store_says(stored):
    found = BackupFile(stored.file)
    assert pages_in(found.parts()) == live(stored.service)
    assert found.counters == stored.service.counters()
    assert found.origin.source == address(stored.directory / "m.db")
    assert stored.file.stat().st_mode & 0o777 == 0o600
    assert (
        "exists already"
        in run_metadata("backup", address(stored.directory / "m.db"), stored.file).output
    )


def test_a_restored_backup_has_what_readers_can_verify(stored, tmp_path):
    done = run_metadata("restore", stored.file, address(tmp_path / "r.db"))
    assert done.exit_code == 0, done.output
    assert "2 pages left out: written without a checksum" in done.output
    before = live(stored.service)
    with opened_store(address(tmp_path / "r.db")) as service:
        wanted = {place: page for place, page in before.items() if page[3]}
        assert len(wanted) == len(before) - 2
        assert live(service) == wanted
        assert service.counters().lease >= stored.service.counters().lease + LEAP
        scope, old = service.scopes["0:kv"], stored.service.scopes["0:kv"]
        gone = [
            slot
            for slot, state in enumerate(old.table.states)
            if state != 2 or not old.table.checksums[slot]
        ]
        used = [slot for slot in gone if old.table.generations[slot]]
        assert used
        assert {scope.table.states[slot] for slot in used} == {3}, (
            "a writer of that time may still hold a lease"
        )
        assert min(scope.table.until[slot] for slot in used) > NOW + 500


def test_a_backup_that_is_not_whole_is_refused(stored, tmp_path):
    whole, chance = stored.file.read_bytes(), random.Random(5)
    places = {*range(40), *(chance.randrange(len(whole)) for _ in range(150)), len(whole) - 1}
    for place in places:
        bad = bytearray(whole)
        bad[place] ^= 1 << chance.randrange(8)
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(SnapshotError):
            BackupFile(tmp_path / "bad")
    for length in {
        0,
        5,
        27,
        28,
        30,
        *(chance.randrange(len(whole)) for _ in range(40)),
        len(whole) - 1,
    }:
        (tmp_path / "bad").write_bytes(whole[:length])
        with pytest.raises(SnapshotError):
            BackupFile(tmp_path / "bad")
    for content in (whole + b"\0", whole + whole, b"SQLite format 3\0" + bytes(1000)):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(SnapshotError):
            BackupFile(tmp_path / "bad")
    done = run_metadata("restore", tmp_path / "bad", address(tmp_path / "r.db"))
    assert done.exit_code == 2
    assert "no backup of a metadata server" in " ".join(done.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["bad"], "nothing was written"


def test_records_of_another_backup_do_not_fit(stored, tmp_path):
    """A record that is whole, and of another place."""
    write_backup(tmp_path / "one", ORIGIN, list(snapshot_of(stored.service, NOW)))
    parts = list(BackupFile(tmp_path / "one").parts())
    write_backup(tmp_path / "two", ORIGIN, [*parts[:1], *parts[2:]])
    one, two = (tmp_path / "one").read_bytes(), (tmp_path / "two").read_bytes()
    (tmp_path / "mixed").write_bytes(one[: len(one) // 2] + two[len(two) // 2 :])
    with pytest.raises(SnapshotError):
        BackupFile(tmp_path / "mixed")


def test_two_backups_to_one_file_at_a_time_are_both_whole(stored, tmp_path):
    parts, file = list(snapshot_of(stored.service, NOW)), tmp_path / "b"

    def slow():
        yield parts[0]
        # Meanwhile another one begins and ends.
        write_backup(file, ORIGIN, parts)
        BackupFile(file)
        yield from parts[1:]

    tally = write_backup(file, ORIGIN, slow())
    assert BackupFile(file).tally.pages == tally.pages
    assert list(tmp_path.glob("*.part")) == []


def test_a_backup_that_cannot_be_written_leaves_nothing(tmp_path):
    def parts():
        yield next(snapshot_of(Engine(MetadataService(), random.Random(3)).service, NOW))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_backup(tmp_path / "b", ORIGIN, parts())
    assert not list(tmp_path.iterdir())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_left_out_is_no_page_any_more(seed):
    engine, dropped = Engine(MetadataService(), random.Random(seed)), Counter()
    for _ in range(40):
        engine.step()
    for scope in engine.service.scopes.values():
        for slot in range(0, len(scope.table), 3):
            scope.table.checksums[slot] = 0
    before, after = Tally(), Tally()
    whole = list(before.over(snapshot_of(engine.service, NOW)))
    less = list(after.over(restored(verifiable(whole, dropped), NOW + 600)))
    assert after.pages == before.pages - dropped.total()
    for name, count in before.scopes.items():
        assert count.pages + count.empty == after.scopes[name].pages + after.scopes[name].empty, (
            "no slot is lost"
        )
    assert all(page[3] for page in pages_in(less).values())


# Of a server that serves.


class Between:
    """A service as a remote server, which serves others before each request of the snapshot."""

    def __init__(self, engine, steps):
        self.engine = engine
        self.steps = steps

    def call(self, path, request, kind):
        for _ in range(self.steps):
            self.engine.step()
        service = self.engine.service
        return (
            service.list_scopes()
            if path == "/v2/scopes"
            else getattr(service, path[4:])(request, self.engine.now)
        )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 4))
def test_a_backup_of_a_serving_server_is_of_one_instant(
    seed, steps, tmp_path_factory, monkeypatch_module
):
    engine = Engine(MetadataService(), random.Random(seed), slots=60)
    for _ in range(60):
        engine.step()
    with RemoteSource(Between(engine, steps), tmp_path_factory.getbasetemp()) as source:
        source.spool()
        instant = live(engine.service)
        found = pages_in(source.parts(drained=False))
        assert found.items() <= instant.items()
        if not steps:
            assert found == instant


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 4))
def test_a_copy_of_a_drained_server_is_whole(seed, steps, tmp_path_factory, monkeypatch_module):
    engine = Engine(MetadataService(), random.Random(seed), slots=60)
    for _ in range(60):
        engine.step()
    remote = Between(engine, steps)
    with RemoteSource(remote, tmp_path_factory.getbasetemp()) as source:
        source.spool()
        remote.steps = 0
        assert pages_in(source.parts(drained=True)) == live(engine.service)
        assert source.changed() == []
        [page, *_] = live(engine.service) or [None]
        if page:
            engine.service.delete(
                p.Delete(scopes=[p.DeleteScope(scope=page[0], keys=[page[1]])]), engine.now
            )
            assert source.changed() == [page[0]]


@pytest.fixture(scope="module")
def monkeypatch_module():
    """Pieces of a few slots, so that small scopes have several."""
    before, remote.CHUNK_SLOTS = remote.CHUNK_SLOTS, 16
    yield
    remote.CHUNK_SLOTS = before


def test_moving_a_server_that_runs(tmp_path):
    """From one server to another, with a client that holds a lease."""
    with served(DURABLE) as (place, client):
        client.call(
            "/v2/initialize",
            p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=5000, slot_bytes=64)]),
            p.Initialized,
        )

        def reserve(keys):
            asked = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=keys)])
            return client.call("/v2/reserve", asked, p.Leases).scopes[0]

        for start in range(0, 3000, 500):
            leases = reserve([f"k{i}" for i in range(start, start + 500)]).leases
            part = p.CommitScope(
                scope="0:kv", leases=leases, lengths=[9] * 500, checksums=list(range(1, 501))
            )
            client.call("/v2/commit", p.Commit(scopes=[part]), p.SettledLeases)
        held = reserve(["held"])
        saved = run_metadata("backup", place.url, tmp_path / "m.backup")
        assert saved.exit_code == 0, saved.output
        assert "3,000 pages in 1 scopes" in saved.output
        done = run_metadata("copy", place.url, address(tmp_path / "b.db"), "--wait", "0")
        assert done.exit_code == 0, done.output
        assert "draining; 1 leases left" in done.output
        assert (
            "holds scopes already"
            in run_metadata("copy", place.url, address(tmp_path / "b.db")).output
        )
        assert run_metadata("status", "--url", place.url).exit_code == 1, "it drains still"
        run_metadata("drain", "--off", "--url", place.url)
        assert (
            "cannot open"
            in run_metadata("copy", place.url, address(tmp_path / "none" / "b.db")).output
        )
        (tmp_path / "c.db").mkdir()
        assert run_metadata("copy", place.url, address(tmp_path / "c.db")).exit_code == 2
        assert (
            "there is no scope 0:typo"
            in run_metadata(
                "copy", place.url, address(tmp_path / "d.db"), "--without", "0:typo"
            ).output
        )
        assert run_metadata("status", "--url", place.url).exit_code == 0
    command = f"{DURABLE.replace('{tmp}/m.db', str(tmp_path / 'b.db'))}"
    with served(command) as (_, client):
        asked = p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=[f"k{i}" for i in range(3000)])])
        found = client.call("/v2/lookup", asked, p.LookedUp).scopes[0]
        assert found.checksums == [*range(1, 501)] * 6
        states = client.call(
            "/v2/commit",
            p.Commit(
                scopes=[p.CommitScope(scope="0:kv", leases=held.leases, lengths=[9], checksums=[9])]
            ),
            p.SettledLeases,
        )
        assert states.scopes[0].states == [p.Settled.STALE], "leases do not travel"
    with opened_store(address(tmp_path / "b.db")) as service:
        assert len(live(service)) == 3000
        assert (
            service.inspect(p.Inspect(scope="0:kv", slots=held.slots), 0).slots[0].state
            is p.SlotState.QUARANTINED
        )


async def test_who_may_export():
    async def asked(right):
        async with running(tokens=Tokens({"secret": right})) as caller:
            head = {"authorization": "Bearer secret"}
            return (await caller.post("/v2/export", {"scope": "0:kv"}, headers=head)).status

    assert [(await asked(right)) for right in (p.Token.READ, p.Token.WRITE, p.Token.ADMIN)] == [
        403,
        403,
        404,
    ]


def test_a_piece_is_as_large_as_a_request_may_be():
    service = MetadataService(structs.replace(DEFAULTS, keys=5))
    engine = Engine(service, random.Random(2))
    for start in (0, 3, 6):
        engine.commit("0:kv", engine.reserve("0:kv", [f"k{start + i}" for i in range(3)]))
    told = service.export(p.Export(scope="0:kv", first=2), NOW)
    assert (told.slots, told.used, told.next_lease > 9) == ([2, 3, 4, 5, 6], 9, True)
    without = service.export(p.Export(scope="0:kv", first=2, rows=False), NOW)
    assert (without.slots, without.digest) == ([], told.digest)
    service.delete(p.Delete(scopes=[p.DeleteScope(scope="0:kv", keys=["k3"])]), NOW)
    after = service.export(p.Export(scope="0:kv", first=2), NOW)
    assert (after.slots, after.other_slots, after.other_seconds) == (
        [2, 4, 5, 6],
        [3],
        [DEFAULTS.quarantine_seconds],
    )
    assert after.digest != told.digest
    with pytest.raises(RequestError):
        service.export(p.Export(scope="9:kv"), NOW)


def test_a_server_that_cannot_be_copied(tmp_path):
    for command in ("copy", "backup"):
        target = address(tmp_path / "x.db") if command == "copy" else tmp_path / "x"
        assert "does not answer" in run_metadata(command, "http://127.0.0.1:9", target).output
    assert isinstance(SnapshotError("x"), StoreError)
    assert [path.name for path in tmp_path.iterdir()] == ["x.db.lock"]
