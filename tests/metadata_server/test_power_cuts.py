"""A SQLite store that is cut off between any two requests to its file system.

A session writes on a FUSE mount that records each request. Afterwards its files are made again as
they were before each request: all of it, as kill -9 leaves it, and without some of the writes that
were not synced yet, as a loss of power may.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import pytest

from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.storage import sqlite
from hicache_metadata_server.storage import store as stores
from tests.fuse.counting_fs import CountingMount, FileChange, file_changes
from tests.metadata_server.services import (
    NOW,
    clear,
    commit,
    delete,
    drop,
    initialize,
    opened,
    reserve,
    state,
    write_and_compact,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


@pytest.fixture
def small_steps(monkeypatch):
    """Compactions of a few blocks, and checkpoints after some of them."""
    monkeypatch.setattr(sqlite, "BATCH_BLOCKS", 2)
    monkeypatch.setattr(stores, "WINDOW_BYTES", 1500)
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 10_000)


@pytest.mark.parametrize(
    ("durability", "cut"),
    [
        (StoreDurability.PROCESS, "kill -9"),
        (StoreDurability.PROCESS, "power"),
        (StoreDurability.MACHINE, "power"),
    ],
)
def test_what_was_acknowledged_is_there(tmp_path, small_steps, durability, cut):
    """After a loss of power with `process`: everything up to some moment."""
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
