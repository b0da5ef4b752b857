"""Stores: durability, recovery, refused files, and a file that is cut off between two requests.

For the last, a session writes on a FUSE mount that records each request. Afterwards its files are
made again as they were before each request: all of it, as kill -9 leaves it, and without some of
the writes that were not synced yet, as a loss of power may.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from bisect import bisect_right
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.storage import sqlite
from hicache_metadata_server.storage import store as stores
from tests.fuse.counting_fs import CountingMount, FileChange, file_changes
from tests.metadata_server.services import (
    NOW,
    STRANGE,
    check_restored,
    clear,
    commit,
    compact_all,
    delete,
    drop,
    initialize,
    killed,
    opened,
    random_changes,
    reserve,
    state,
    write_and_compact,
)
from tests.support.commands import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def database(directory):
    """The file of a store as another program opens it."""
    with closing(sqlite3.connect(directory / "m.db")) as one, one:
        yield one


def logged(directory):
    """Groups that are not compacted."""
    with database(directory) as one:
        return one.execute("SELECT count(*) FROM log").fetchone()[0]


def test_a_clear_writes_one_row_however_much_it_clears(tmp_path):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    commit(service, reserve(service, STRANGE).leases)
    store.write(service.take_changes())
    clear(service)
    assert not service.take_changes().slots
    store.close()


@pytest.mark.parametrize(("size", "batch", "groups"), [(20, 4, 20), (300, 60, 140)])
def test_random_histories_come_back_exactly(tmp_path, monkeypatch, size, batch, groups):
    """Killed after every few groups, compacted or half compacted; in one block and in several, of
    which one batch compacts one."""
    monkeypatch.setattr(sqlite, "BATCH_BLOCKS", 1)
    monkeypatch.setattr(stores, "WINDOW_BYTES", 2000)
    chance, now = random.Random(5), NOW
    store, service = opened(tmp_path)
    initialize(service, "0:kv", "0:mamba", slots=size)
    service.scopes["0:mamba"].tenant = "acme"
    store.write(service.take_changes())
    for _ in range(150):
        scope = chance.choice(("0:kv", "0:mamba"))
        random_changes(chance, service, scope, now, size=size, batch=batch)
        write_and_compact(chance, store, service, now)
        now += chance.choice((0.0, 1.0, 3.0))
        if chance.random() < 0.2:
            service.settle(now, 10**5)
            before = state(service, now)
            killed(store)
            store, service = opened(tmp_path, now)
            assert service.recovery_problems == []
            check_restored(before, state(service, now))
        assert logged(tmp_path) < groups, "what is compacted leaves the log"
    compact_all(store, service)
    assert logged(tmp_path) == 0
    store.close()


NO_DATABASE = (
    b"not a database at all, but long enough to look at" * 50,
    b"SQLite format 3\x00" + b"x" * 5000,
)
DAMAGED = [b"", b"\x90", msgspec.msgpack.encode([b"", *[b"x"] * 6, [], [], {}])]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        *((content, "cannot open") for content in NO_DATABASE),
        ("PRAGMA application_id = 7", "database of something else"),
        ("PRAGMA user_version = 99", "later version"),
        (
            "PRAGMA user_version = 6",
            r"earlier version of this server \(schema 6;.*: delete it, and",
        ),
        *((f"UPDATE blocks SET slots = x'{blob.hex()}'", "cannot be read") for blob in DAMAGED),
        ("INSERT INTO log VALUES (1, x'6e6f')", "cannot be read"),
    ],
)
def test_a_store_that_cannot_be_read_is_refused_and_stays(tmp_path, damage, said):
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    reserve(service, ["a"])
    store.write(service.take_changes())
    compact_all(store, service)
    store.close()
    assert {file.name for file in tmp_path.iterdir()} == {"m.db"}
    if isinstance(damage, bytes):
        (tmp_path / "m.db").write_bytes(damage)
    else:
        with database(tmp_path) as one:
            one.execute(damage)
    before = (tmp_path / "m.db").read_bytes()
    with pytest.raises(StoreError, match=said):
        opened(tmp_path)
    assert (tmp_path / "m.db").read_bytes() == before


def test_a_program_that_closes_the_database_leaves_its_log(tmp_path):
    """The last program to close a database deletes its log. One that took itself for the last, as
    the server had lost its locks, would leave the server writing into a deleted file."""
    store, service = opened(tmp_path)
    initialize(service, "0:kv")
    store.write(service.take_changes())
    program = (
        "import sqlite3, sys; one = sqlite3.connect(sys.argv[1]); one.execute('SELECT * FROM log')"
    )
    run_python(f"{program}.fetchall(); one.close()", tmp_path / "m.db")
    reserve(service, ["a"])
    store.write(service.take_changes())
    (tmp_path / "as-killed").mkdir()
    for file in tmp_path.glob("m.db*"):
        shutil.copy(file, tmp_path / "as-killed")
    again, service = opened(tmp_path / "as-killed")
    assert service.scopes["0:kv"].table.keys == ["a"]
    again.close()
    store.close()


# Power cuts.


SECTOR = 512
"""Bytes of which a disk writes all or nothing."""


class Session(NamedTuple):
    """What a store has asked of its file system, and what it has promised."""

    requests: list[FileChange]
    states: list[list[object]]
    """What clients see after each group."""
    acknowledged: list[int]
    """Requests by the time at which each of these states was acknowledged."""


def groups(service) -> Iterator[None]:
    """Change a service, a group at a time."""
    initialize(service, "0:kv", "1:kv", slots=100)
    yield
    for turn in range(5):
        keys = [f"{turn}-{i}" for i in range(12)]
        leases = reserve(service, keys, prefixes=["", *keys[:-1]]).leases
        yield
        commit(service, leases[:-2])
        delete(service, keys[:3])
        if turn == 2:
            clear(service)
            service.settle(NOW, 1000)
        if turn == 3:
            drop(service, "1:kv")
        yield


def recorded(directory: Path, durability: StoreDurability) -> Session:
    journal = directory / "journal"
    states, acknowledged, chance = list[list[object]](), list[int](), random.Random(1)
    with CountingMount(directory / "backing", directory / "mount", journal=journal) as mount:
        store, service = opened(mount.point, durability=durability)
        steps = groups(service)
        while True:
            assert state(service, NOW) not in states
            states.append(state(service, NOW))
            acknowledged.append(len(file_changes(journal)))
            if next(steps, store) is store:
                break
            write_and_compact(chance, store, service, NOW)
        store.close()
    return Session(file_changes(journal), states, acknowledged)


def files_at(requests: list[FileChange], is_kept: Callable[[bool], bool]) -> dict[str, bytearray]:
    """The files as they are after requests; `is_kept` decides about each sector, by whether it was
    synced."""
    last_sync = {
        request.path: number
        for number, request in enumerate(requests)
        if request.operation == "fsync"
    }
    files = dict[str, bytearray]()
    for number, (operation, path, offset, data) in enumerate(requests):
        file = files.setdefault(path, bytearray())
        match operation:
            case "write":
                synced = number < last_sync.get(path, -1)
                for place in range(0, len(data), SECTOR):
                    part = data[place : place + SECTOR]
                    at = offset + place
                    file.extend(bytes(max(at + len(part) - len(file), 0)))
                    if is_kept(synced):
                        file[at : at + len(part)] = part
            case "truncate":
                file.extend(bytes(max(offset - len(file), 0)))
                del file[offset:]
            case "unlink":
                del files[path]
            case "rename":
                files[data.decode()] = files.pop(path)
            case _:
                pass
    # SQLite makes the index of its log anew.
    return {path: file for path, file in files.items() if not path.endswith("-shm")}


@pytest.mark.parametrize(
    ("durability", "cut"),
    [
        (StoreDurability.PROCESS, "kill -9"),
        (StoreDurability.PROCESS, "power"),
        (StoreDurability.MACHINE, "power"),
    ],
)
def test_what_was_acknowledged_is_there(tmp_path, monkeypatch, durability, cut):
    """After a loss of power with `process`: everything up to some moment."""
    # Compactions of a few blocks, and checkpoints after some of them.
    monkeypatch.setattr(sqlite, "BATCH_BLOCKS", 2)
    monkeypatch.setattr(stores, "WINDOW_BYTES", 1500)
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 10_000)
    session, chance = recorded(tmp_path, durability), random.Random(3)
    operations = {request.operation for request in session.requests}
    assert operations >= {"write", "fsync", "unlink"}
    found, losses = set[int](), set[int]()
    for count in range(1, len(session.requests) + 1):
        share = chance.choice((0.0, 0.5, 0.97))
        files = files_at(
            session.requests[:count],
            lambda synced, share=share: cut == "kill -9" or synced or chance.random() < share,
        )
        directory = tmp_path / str(count)
        directory.mkdir()
        for path, content in files.items():
            (directory / path[1:]).write_bytes(content)
        store, service = opened(directory)
        assert service.recovery_problems == []
        at = session.states.index(state(service, NOW))
        store.close()
        # The newest state that was acknowledged by then.
        least = bisect_right(session.acknowledged, count) - 1
        losses.add(max(least - at, 0))
        assert at <= least + 1
        found.add(at)
    if cut == "power" and durability is StoreDurability.PROCESS:
        assert max(losses) > 1
    else:
        assert losses == {0}
        assert found == set(range(len(session.states)))
