"""The map compared with the data files: every fault is found, and nothing else goes."""

from __future__ import annotations

import random
import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_backends.hf3fs.slots.checking import ExpectedPage, SlotFileSet, SlotVerdict
from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import opened_store
from hicache_metadata_server.core.codec import BLOCK, SlotColumns
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.storage.sqlite import SCOPE_BITS
from tests.backends.hf3fs.harness import Rig, chain
from tests.metadata_server import servers
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.servers import served
from tests.metadata_server.services import compact_all, opened
from tests.metadata_server.test_backup import Engine, address, live, write
from tests.support.commands import run_metadata

SERVE = f"{servers.SERVE} --store STORE --quarantine-seconds 0.05"
PAGES = 24
NAMES = chain("p", PAGES)


class Files:
    """A slot file of the driver, to be spoiled."""

    def __init__(self, path, layout):
        self.path, self.offset, self.slot_bytes = path, layout.offset, layout.geometry.slot_bytes

    def flip(self, slot, at):
        with open(self.path, "r+b") as file:
            file.seek(self.offset(slot) + at)
            [byte] = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

    def swap(self, one, other):
        """Each of two slots gets the other's page."""
        with open(self.path, "r+b") as file:
            pages = []
            for slot in (one, other):
                file.seek(self.offset(slot))
                pages.append(file.read(self.slot_bytes))
            for slot, page in zip((other, one), pages, strict=True):
                file.seek(self.offset(slot))
                file.write(page)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A driver's directory and the store of its server, as they were left."""
    directory = tmp_path_factory.mktemp("repair")
    with served(SERVE.replace("STORE", address(directory / "m.db"))) as (server, _):
        rig = Rig(directory / "data", metadata_url=server.url, file_size="1MiB")
        with closing(rig.storage):
            # One key has to be escaped by the driver.
            assert all([*rig.put(NAMES[:-1]), *rig.put(["~tilde"])])
            slots = {key: rig.slot(key) for key in NAMES[:-1]}
            # The server was killed: there is a log.
            yield SimpleNamespace(directory=directory, rig=rig, slots=slots, scope=rig.scope)


@pytest.fixture
def planted(place, tmp_path):
    """A copy of both."""
    shutil.copytree(place.directory / "data", tmp_path / "data", symlinks=True)
    for file in place.directory.glob("m.db*"):
        shutil.copy(file, tmp_path)
    layout = place.scope.file
    return SimpleNamespace(
        store=address(tmp_path / "m.db"),
        data=tmp_path / "data",
        files=Files(tmp_path / "data" / Path(layout.path).name, layout),
        slots=place.slots,
        scope=place.scope.name,
        page_bytes=place.rig.page_bytes,
    )


def left(planted):
    with opened_store(planted.store) as (service, _):
        return {key for _, key in live(service)}


def fsck(planted, *options):
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, *options)
    return done.exit_code, " ".join(done.output.split()), done.output.splitlines()


def test_what_is_whole_is_left_alone(planted):
    assert len(left(planted)) == PAGES
    before = (planted.data.parent / "m.db").read_bytes()
    status, told, _ = fsck(planted, "--repair")
    assert (status, f"{PAGES} pages: holds its page" in told) == (0, True)
    assert (planted.data.parent / "m.db").read_bytes() == before
    assert len(left(planted)) == PAGES


def test_every_page_that_is_not_in_its_slot_is_found_and_goes(planted):
    files, slots, names, bad = planted.files, planted.slots, iter(NAMES), {}
    for at in (0, 500, planted.page_bytes - 1):
        bad[name := next(names)] = SlotVerdict.DAMAGED
        files.flip(slots[name], at)
    # Of the envelope: magic number, length, fingerprint, key, checksum.
    for at in (0, 8, 16, 32, 56):
        bad[name := next(names)] = SlotVerdict.OTHER
        files.flip(slots[name], planted.page_bytes + at)
    one, other, spared = next(names), next(names), next(names)
    bad[one] = bad[other] = SlotVerdict.OTHER
    files.swap(slots[one], slots[other])
    # The generation of the envelope is nobody's proof.
    files.flip(slots[spared], planted.page_bytes + 48)
    # The last of the chain, and the escaped page that was written behind it.
    highest = max(NAMES[:-1], key=slots.__getitem__)
    with files.path.open("r+b") as file:
        file.truncate(files.offset(slots[highest]) + planted.page_bytes + 63)
    bad[highest] = SlotVerdict.SHORT
    content = files.path.read_bytes()
    status, _, lines = fsck(planted)
    assert (status, len(left(planted))) == (1, PAGES), "without --repair nothing changes"
    found = {
        line.rpartition(": ")[2].strip("'"): verdict
        for line in lines
        for verdict in SlotVerdict
        if line.startswith(planted.scope) and f" {verdict}: " in line
    }
    [escaped] = found.keys() - bad.keys()
    assert found == bad | {escaped: SlotVerdict.SHORT}
    assert fsck(planted, "--repair")[0] == 1
    kept = left(planted)
    assert not kept & found.keys()
    assert len(kept) == PAGES - len(found)
    assert spared in kept
    assert files.path.read_bytes() == content, "data is never written"
    assert fsck(planted)[0] == 0


@pytest.mark.parametrize(
    ("name", "length", "checksum", "verdict"),
    [
        (0, 0, 0, SlotVerdict.WHOLE),
        (0, None, None, SlotVerdict.UNKNOWN),
        (0, 64, 0, SlotVerdict.LENGTH),
        (0, 10**6, 0, SlotVerdict.LENGTH),
        (0, -1, 0, SlotVerdict.OTHER),
        (0, 0, 1, SlotVerdict.OTHER),
        (1, 0, 0, SlotVerdict.OTHER),
    ],
)
def test_what_the_map_says_is_compared_with_the_slot(planted, name, length, checksum, verdict):
    """A length that cannot be, and one that is not known, among others."""
    with opened_store(planted.store) as (service, _):
        scope = service.scopes[planted.scope]
        slot = planted.slots[NAMES[0]]
        known = scope.table.lengths[slot], scope.table.checksums[slot]
    with closing(SlotFileSet(str(planted.data)).file_of(scope.geometry)) as checked:
        if length is None:
            said = 0, 0
        else:
            said = (length if length > 0 else known[0] + length), known[1] ^ checksum
        assert checked.verdict(ExpectedPage(slot, NAMES[name], *said)) is verdict


def test_a_file_that_is_gone_or_cannot_be_read(planted):
    path = planted.files.path
    path.unlink()
    path.mkdir()
    status, told, _ = fsck(planted, "--repair")
    assert (status, f"{PAGES} pages: cannot be read" in told) == (2, True)
    assert len(left(planted)) == PAGES, "what cannot be read may be right"
    path.rmdir()
    assert fsck(planted, "--repair")[0] == 1
    assert left(planted) == set()


def test_a_mount_that_is_not_there_costs_nothing(planted):
    (planted.data / "store.id").unlink()
    status, told, _ = fsck(planted, "--repair")
    assert (status, "not mounted" in told) == (2, True)
    (planted.data / "store.id").symlink_to("ffffffff")
    status, told, _ = fsck(planted, "--repair")
    assert (status, f"{PAGES} pages: in scopes of other directories" in told) == (0, True)
    assert len(left(planted)) == PAGES


def test_without_the_driver_the_error_names_the_package(planted, monkeypatch):
    # None is how Python remembers that a module cannot be imported.
    monkeypatch.setitem(sys.modules, "hicache_backends.hf3fs.fsck", None)
    status, told, _ = fsck(planted)
    assert (status, "pip install hicache-storage" in told) == (2, True)


def test_a_sample(planted):
    for key in NAMES[:-1]:
        planted.files.flip(planted.slots[key], 7)
    drawn = set()
    for _ in range(30):
        status, _, lines = fsck(planted, "--sample", "5")
        found = [line for line in lines if line.startswith("0:") and "are not those" in line]
        assert (status, len(found) >= 4) == (1, True), "one page of all is whole"
        drawn |= {line.rpartition(": ")[2] for line in found}
    assert len(drawn) > 12, "any page may be drawn"
    every = fsck(planted, "--sample", str(PAGES + 5))[2]
    assert sum(line.startswith("0:") for line in every) == PAGES - 1


def test_of_a_server_that_runs(planted):
    bad = [NAMES[2], NAMES[5], NAMES[6]]
    for key in bad:
        planted.files.flip(planted.slots[key], 100)
    with served(SERVE.replace("STORE", planted.store)) as (server, client):
        check_running(server, client, planted.scope, planted.data, NAMES[:-1], bad)
        assert run_metadata("fsck", "0:other", "--url", server.url).exit_code == 2
        told = run_metadata("fsck", "--url", server.url, "--repair").output
        assert "a running server cannot be repaired" in " ".join(told.split())
        assert "another server has this store" in fsck(planted)[1]
    told = run_metadata("fsck", "0:kv", "--store", planted.store, "--repair").output
    assert "checked as a whole" in " ".join(told.split())


def check_running(server, client, scope, data, names, bad):
    """Pages that are damaged are found and deleted, and no others."""
    where = ("--url", server.url, "--files", data)
    done = run_metadata("fsck", *where)
    assert done.exit_code == 1, done.output
    assert sum(line.startswith(scope) for line in done.output.splitlines()) == 3
    done = run_metadata("fsck", scope, *where, "--repair")
    assert "3 pages deleted" in done.output
    assert run_metadata("fsck", *where).exit_code == 0
    asked = p.Lookup(scopes=[p.LookupScope(scope=scope, keys=names)])
    slots = client.call("/v2/lookup", asked, p.LookedUp).scopes[0].slots
    assert [key for key, slot in zip(names, slots, strict=True) if slot < 0] == bad


@pytest.fixture(params=["one Redis", pytest.param("a cluster", marks=pytest.mark.fuzz)])
def shared_url(request, tmp_path):
    with redis_server(tmp_path) if request.param == "one Redis" else redis_cluster(tmp_path) as one:
        yield one.url


def test_of_servers_on_one_redis(shared_url, tmp_path):
    """The driver writes through one of them, and the other one is asked."""
    command, data = f"{SERVE.replace('STORE', shared_url)} --durability none", tmp_path / "data"
    with served(command) as (server, _), served(command) as (other, client):
        rig = Rig(data, metadata_url=server.url, file_size="1MiB")
        with closing(rig.storage):
            assert all(rig.put(NAMES))
            done = run_metadata("fsck", "--url", other.url, "--files", data)
            assert (done.exit_code, "24 pages: holds its page" in done.output) == (0, True)
            bad, files = NAMES[2:5], Files(rig.scope.file.path, rig.scope.file)
            files.flip(rig.slot(bad[0]), 100)
            files.swap(rig.slot(bad[1]), rig.slot(bad[2]))
            check_running(other, client, rig.scope.name, data, NAMES, bad)
            assert rig.put(bad, version=1) == [True] * 3
            rig.expect(bad, version=1)
            assert run_metadata("fsck", "--url", other.url, "--files", data).exit_code == 0
            done = run_metadata("fsck", "--store", shared_url, "--files", data)
            assert (done.exit_code, "24 pages: holds its page" in done.output) == (0, True)


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


def test_a_store_that_contradicts_itself_is_mended(tmp_path):
    engine = Engine(MetadataService(), random.Random(4), slots=100, keys=30)
    for _ in range(60):
        engine.step()
    write(tmp_path / "m.db", engine.service)
    before = live(engine.service)
    spoil(tmp_path / "m.db")
    store = address(tmp_path / "m.db")
    told = run_metadata("fsck", "--store", store)
    assert told.exit_code == 1
    assert [said for said in SAID if f"slot {said}" not in told.output] == []
    for status in (1, 0):
        mended = run_metadata("fsck", "--store", store, "--repair")
        assert mended.exit_code == status, mended.output
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
