"""The map compared with the data files: every fault is found, and nothing else goes."""

from __future__ import annotations

import random
import shutil
import sys
import time
from array import array
from contextlib import closing
from types import SimpleNamespace

import pytest

from hicache_backends.hf3fs.slots.checking import ExpectedPage, SlotFileSet, SlotVerdict
from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.fsck import _live_pages, _OpenedService
from hicache_metadata_server.cli.options import opened_store
from hicache_metadata_server.cli.page_checks import check_all_pages, open_page_checker, sampled
from hicache_metadata_server.core.changes import Changes
from hicache_metadata_server.core.codec import SlotChanges, SlotLeases, SlotStates
from hicache_metadata_server.core.restore import SlotRow
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.storage.factory import open_store
from tests.backends.hf3fs.harness import Rig, chain
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.servers import served
from tests.metadata_server.test_backup import Engine, address, live, write
from tests.support.commands import run_metadata

SERVE = (
    f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve '
    f"--port {{port}}"
    " --store sqlite:///STORE --quarantine-seconds 0.05"
)
PAGES = 24
NAMES = chain("p", PAGES)


def flip(rig, slot, at):
    with open(rig.scope.file.path, "r+b") as file:
        file.seek(rig.scope.file.offset(slot) + at)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def swap(rig, one, other):
    """Each of two slots gets the other's page."""
    size = rig.scope.file.geometry.slot_bytes
    with open(rig.scope.file.path, "r+b") as file:
        pages = []
        for slot in (one, other):
            file.seek(rig.scope.file.offset(slot))
            pages.append(file.read(size))
        for slot, page in zip((other, one), pages, strict=True):
            file.seek(rig.scope.file.offset(slot))
            file.write(page)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A driver's directory and the store of its server, as they were left."""
    directory = tmp_path_factory.mktemp("repair")
    with served(SERVE.replace("STORE", str(directory / "m.db"))) as (server, _):
        rig = Rig(directory / "data", metadata_url=server.url, file_size="1MiB")
        try:
            assert all(rig.put(NAMES[:-1]))
            # A key that the driver has to escape.
            assert all(rig.put(["~tilde"]))
            slots = {key: rig.slot(key) for key in NAMES[:-1]}
            scope, page_bytes = rig.scope.name, rig.page_bytes
            store_file, where = rig.scope.file, rig.scope
        finally:
            rig.storage.close()
    return SimpleNamespace(
        directory=directory,
        data=directory / "data",
        slots=slots,
        scope=scope,
        page_bytes=page_bytes,
        file=store_file,
        where=where,
    )


@pytest.fixture
def planted(place, tmp_path):
    """A copy of both, to be spoiled."""
    shutil.copytree(place.data, tmp_path / "data", symlinks=True)
    for file in place.directory.glob("m.db*"):
        # Its server was killed: there is a log.
        shutil.copy(file, tmp_path)
    moved = tmp_path / "data" / place.file.path.rpartition("/")[2]
    rig = SimpleNamespace(
        scope=SimpleNamespace(
            file=SimpleNamespace(
                path=str(moved), offset=place.file.offset, geometry=place.file.geometry
            )
        )
    )
    return SimpleNamespace(
        store=address(tmp_path / "m.db"),
        data=tmp_path / "data",
        rig=rig,
        file=moved,
        slots=place.slots,
        scope=place.scope,
        page_bytes=place.page_bytes,
    )


def left(planted):
    with opened_store(planted.store) as (service, _):
        return {key for _, key in live(service)}


def test_what_is_whole_is_left_alone(planted):
    assert len(left(planted)) == PAGES
    before = (planted.data.parent / "m.db").read_bytes()
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--repair")
    assert done.exit_code == 0, done.output
    assert f"{PAGES} pages: holds its page" in done.output
    assert (planted.data.parent / "m.db").read_bytes() == before
    assert len(left(planted)) == PAGES


def test_every_page_that_is_not_in_its_slot_is_found_and_goes(planted):
    rig, slots = planted.rig, planted.slots
    names = iter(NAMES)
    bad = {}
    for at in (0, 500, planted.page_bytes - 1):
        bad[name := next(names)] = SlotVerdict.DAMAGED
        flip(rig, slots[name], at)
    # Of the envelope: magic number, length, fingerprint, key, checksum.
    for at in (0, 8, 16, 32, 56):
        bad[name := next(names)] = SlotVerdict.OTHER
        flip(rig, slots[name], planted.page_bytes + at)
    one, other = next(names), next(names)
    bad[one] = bad[other] = SlotVerdict.OTHER
    swap(rig, slots[one], slots[other])
    spared = next(names)
    # The generation of the envelope is nobody's proof.
    flip(rig, slots[spared], planted.page_bytes + 48)
    highest = max(NAMES[:-1], key=slots.__getitem__)
    tail = rig.scope.file.offset(slots[highest])
    with planted.file.open("r+b") as file:
        file.truncate(tail + planted.page_bytes + 63)
    # Written behind the last of the chain.
    bad["~"] = SlotVerdict.SHORT
    content = planted.file.read_bytes()
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data)
    assert done.exit_code == 1, done.output
    assert len(left(planted)) == PAGES, "without --repair nothing changes"
    told = [line for line in done.output.splitlines() if line.startswith(planted.scope)]
    found = {}
    for line in told:
        for verdict in SlotVerdict:
            if f" {verdict}: " in line:
                found[line.rpartition(": ")[2].strip("'")] = verdict
    late = {name for name, verdict in found.items() if verdict is SlotVerdict.SHORT}
    assert {name: verdict for name, verdict in found.items() if name not in late} == {
        n: v for n, v in bad.items() if n != "~"
    }
    assert highest in late
    assert len(late) == 2, "the last page, and the escaped one that was written behind it"
    mended = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--repair")
    assert mended.exit_code == 1
    assert left(planted) == left(planted) - found.keys()
    assert len(left(planted)) == PAGES - len(found)
    assert spared in left(planted)
    assert planted.file.read_bytes() == content, "data is never written"
    assert run_metadata("fsck", "--store", planted.store, "--files", planted.data).exit_code == 0


def test_a_length_that_cannot_be_and_one_that_is_not_known(planted):
    with opened_store(planted.store) as (service, _):
        scope = service.scopes[planted.scope]
        files = SlotFileSet(str(planted.data))
        checked = files.file_of(scope.geometry)
        slot = planted.slots[NAMES[0]]
        length, checksum = scope.table.lengths[slot], scope.table.checksums[slot]
    with closing(checked):
        assert checked.verdict(ExpectedPage(slot, NAMES[0], length, checksum)) is SlotVerdict.WHOLE
        assert checked.verdict(ExpectedPage(slot, NAMES[0], 0, 0)) is SlotVerdict.UNKNOWN
        assert checked.verdict(ExpectedPage(slot, NAMES[0], 64, checksum)) is SlotVerdict.LENGTH
        assert (
            checked.verdict(ExpectedPage(slot, NAMES[0], scope.geometry.slot_bytes + 1, checksum))
            is SlotVerdict.LENGTH
        )
        assert (
            checked.verdict(ExpectedPage(slot, NAMES[0], length - 1, checksum)) is SlotVerdict.OTHER
        )
        assert (
            checked.verdict(ExpectedPage(slot, NAMES[0], length, checksum ^ 1)) is SlotVerdict.OTHER
        )
        assert checked.verdict(ExpectedPage(slot, NAMES[1], length, checksum)) is SlotVerdict.OTHER


def test_a_file_that_is_gone_or_cannot_be_read(planted):
    planted.file.unlink()
    planted.file.mkdir()
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--repair")
    assert done.exit_code == 2
    assert f"{PAGES} pages: cannot be read" in done.output
    assert len(left(planted)) == PAGES, "what cannot be read may be right"
    planted.file.rmdir()
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--repair")
    assert done.exit_code == 1
    assert left(planted) == set()


def test_a_mount_that_is_not_there_costs_nothing(planted):
    (planted.data / "store.id").unlink()
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--repair")
    assert done.exit_code == 2
    assert "not mounted" in " ".join(done.output.split())
    (planted.data / "store.id").symlink_to("ffffffff")
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--repair")
    assert done.exit_code == 0
    assert f"{PAGES} pages: in scopes of other directories" in done.output
    assert len(left(planted)) == PAGES


def test_without_the_driver_the_error_names_the_package(planted, monkeypatch):
    # None is how Python remembers that a module cannot be imported.
    monkeypatch.setitem(sys.modules, "hicache_backends.hf3fs.fsck", None)
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data)
    assert done.exit_code == 2
    assert "pip install hicache-storage" in done.output


def test_a_sample(planted):
    with (
        opened_store(planted.store) as (service, _),
        closing(open_page_checker(planted.data)) as checker,
    ):
        opened = _OpenedService(service)
        scopes = opened.call("/v2/scopes", None, p.Scopes).scopes
        parts = list(_live_pages(opened, scopes))
        for size in (1, 5, PAGES, PAGES + 5):
            found = check_all_pages(sampled(parts, size, random.Random(1)), checker)
            assert found.verdicts == {SlotVerdict.WHOLE: min(size, PAGES)}
        drawn = set()
        for seed in range(60):
            drawn |= {
                page.key for _, pages in sampled(parts, 3, random.Random(seed)) for page in pages
            }
        assert len(drawn) == PAGES, "each page may be drawn"
    for key in NAMES[:-1]:
        flip(planted.rig, planted.slots[key], 7)
    done = run_metadata("fsck", "--store", planted.store, "--files", planted.data, "--sample", "20")
    assert done.exit_code == 1
    assert (
        sum(
            "bytes that are not those" in line
            for line in done.output.splitlines()
            if line.startswith("0:")
        )
        >= 19
    )


def test_of_a_server_that_runs(planted):
    bad = [NAMES[2], NAMES[5], NAMES[6]]
    for key in bad:
        flip(planted.rig, planted.slots[key], 100)
    with served(SERVE.replace("STORE", planted.store.removeprefix("sqlite:///"))) as (
        server,
        client,
    ):
        where = ("--url", server.url, "--files", planted.data)
        done = run_metadata("fsck", *where)
        assert done.exit_code == 1, done.output
        assert sum(line.startswith(planted.scope) for line in done.output.splitlines()) == 3
        assert run_metadata("fsck", "0:other", *where).exit_code == 2
        done = run_metadata("fsck", planted.scope, *where, "--repair")
        assert "3 pages deleted" in done.output
        assert run_metadata("fsck", *where).exit_code == 0
        asked = p.Lookup(scopes=[p.LookupScope(scope=planted.scope, keys=NAMES[:-1])])
        slots = client.call("/v2/lookup", asked, p.LookedUp).scopes[0].slots
        assert [key for key, slot in zip(NAMES, slots, strict=False) if slot < 0] == bad
        assert "a running server cannot be repaired" in " ".join(
            run_metadata("fsck", "--url", server.url, "--repair").output.split()
        )
        assert (
            "another server has this store"
            in run_metadata("fsck", "--store", planted.store, "--files", planted.data).output
        )
    assert "checked as a whole" in " ".join(
        run_metadata("fsck", "0:kv", "--store", planted.store, "--repair").output.split()
    )


@pytest.fixture(params=["one Redis", pytest.param("a cluster", marks=pytest.mark.fuzz)])
def shared_url(request, tmp_path):
    with redis_server(tmp_path) if request.param == "one Redis" else redis_cluster(tmp_path) as one:
        yield one.url


def test_of_servers_on_one_redis(shared_url, tmp_path):
    """The driver writes through one of them, and the other one is asked."""
    command = SERVE.replace("sqlite:///STORE", shared_url) + " --durability none"
    with served(command) as (server, _), served(command) as (other, client):
        rig = Rig(tmp_path / "data", metadata_url=server.url, file_size="1MiB")
        try:
            assert all(rig.put(NAMES))
            where = ("--url", other.url, "--files", tmp_path / "data")
            done = run_metadata("fsck", *where)
            assert (done.exit_code, "24 pages: holds its page" in done.output) == (0, True), (
                done.output
            )
            bad = NAMES[2:5]
            flip(rig, rig.slot(bad[0]), 100)
            swap(rig, rig.slot(bad[1]), rig.slot(bad[2]))
            done = run_metadata("fsck", *where)
            assert done.exit_code == 1, done.output
            assert sum(line.startswith(rig.scope.name) for line in done.output.splitlines()) == 3
            done = run_metadata("fsck", rig.scope.name, *where, "--repair")
            assert "3 pages deleted" in done.output
            assert run_metadata("fsck", *where, "--sample", "5").exit_code == 0
            asked = p.Lookup(scopes=[p.LookupScope(scope=rig.scope.name, keys=NAMES)])
            slots = client.call("/v2/lookup", asked, p.LookedUp).scopes[0].slots
            assert [key for key, slot in zip(NAMES, slots, strict=True) if slot < 0] == bad
            assert rig.put(bad, version=1) == [True] * 3
            rig.expect(bad, version=1)
            assert run_metadata("fsck", *where).exit_code == 0
            done = run_metadata("fsck", "--store", shared_url, "--files", tmp_path / "data")
            assert (done.exit_code, "24 pages: holds its page" in done.output) == (0, True)
        finally:
            rig.storage.close()


# A store that contradicts itself.


def spoil(file, scope, rows):
    """Write rows into a store that no server would write."""

    store = open_store(address(file))
    recovered = store.recover(0.0)
    [record] = [record for record in recovered.scopes if record.geometry.scope == scope]
    for row in rows:
        store.write(
            Changes(slots={record.number: changes_of_row(row._replace(epoch=record.epoch))})
        )
    store.close()


def changes_of_row(row):
    def wide(*values):
        return array("Q", values).tobytes()

    states = SlotStates(
        row.epoch,
        wide(row.slot),
        bytes([row.state]),
        array("d", [row.until]).tobytes(),
        wide(row.length),
        wide(row.checksum),
    )
    return SlotChanges(
        states,
        SlotLeases(
            wide(row.slot), wide(row.generation), wide(row.lease), [row.key], [row.prefix], []
        ),
    )


SPOILED = [
    SlotRow(90, 0, LIVE, 3, "twice", "", "", 9001, 0.0, 7, 7),
    SlotRow(91, 0, LIVE, 3, "twice", "", "", 9002, 0.0, 7, 7),
    SlotRow(92, 0, 77, 3, "nonsense", "", "", 9003, 0.0, 7, 7),
    SlotRow(93, 0, LIVE, 0, "no generation", "", "", 9004, 0.0, 7, 7),
    SlotRow(94, 0, LIVE, 3, "no lease", "", "", 0, 0.0, 7, 7),
    SlotRow(95, 0, LIVE, 3, "", "", "", 9005, 0.0, 7, 7),
    SlotRow(5000, 0, LIVE, 3, "outside", "", "", 9006, 0.0, 7, 7),
]
LOST = [
    SlotRow(96, 0, LEASED, 3, "for ever", "", "", 9007, 1e15, 0, 0),
    SlotRow(97, 0, QUARANTINED, 3, "", "", "", 0, 1e15, 0, 0),
]


def test_a_store_that_contradicts_itself_is_mended(tmp_path):
    engine = Engine(MetadataService(), random.Random(4), slots=100, keys=30)
    for _ in range(60):
        engine.step()
    write(tmp_path / "m.db", engine.service)
    before = live(engine.service)
    spoil(tmp_path / "m.db", "0:kv", [*SPOILED, *LOST])
    store = address(tmp_path / "m.db")
    told = run_metadata("fsck", "--store", store)
    assert told.exit_code == 1
    for said in (
        "slot 91 belongs to the key of slot 90",
        "slot 92 has the unknown state",
        "slot 93 is live",
        "slot 94 is live",
        "slot 95 is live",
        "slot 5000 is outside",
    ):
        assert said in told.output
    mended = run_metadata("fsck", "--store", store, "--repair")
    assert mended.exit_code == 1, mended.output
    again = run_metadata("fsck", "--store", store, "--repair")
    assert again.exit_code == 0, again.output
    with opened_store(store) as (service, _):
        assert live(service) == {**before, ("0:kv", "twice"): (90, 3, 7, 7, "")}
        scope = service.scopes["0:kv"]
        lost = list(range(91, 98))
        assert not {scope.table.states[slot] for slot in lost} & {LIVE}
        # A lease ends first, and then rests.
        for seconds in (service.max_hold_seconds, 2 * service.max_hold_seconds):
            scope.settle(time.time() + seconds + 1, 10_000)
        assert {scope.table.states[slot] for slot in lost if slot < len(scope.table)} == {FREE}, (
            "lost slots return"
        )
