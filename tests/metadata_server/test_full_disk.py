"""A store on a full disk: responses, logs and metrics, and recovery when there is room again."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.http import runtime
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.server import restored_service
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage import group_commit
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.full_disks import small_disk
from tests.metadata_server.http_calls import Caller, running
from tests.support.commands import run_program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

PATIENCE = 20.0
NOW = 1_700_000_000.0
SCOPE = {"scopes": [{"scope": "0:kv", "slots": 10_000}]}
SERVE = [
    sys.executable,
    "-c",
    "from hicache_storage.cli.main import main; main()",
    "metadata",
    "serve",
    "--port",
    "0",
]


@dataclass
class FillableStore:
    """A store that a test can fill, and a server on it."""

    fill: Callable[[], None]
    empty: Callable[[], None]
    serving: Callable[[], Any]
    """A running server, as a context manager."""
    keeps: bool = True


@contextmanager
def memory_store(_: Path) -> Iterator[FillableStore]:
    yield FillableStore(lambda: None, lambda: None, running, keeps=False)


@contextmanager
def sqlite_store(
    directory: Path, durability: StoreDurability = StoreDurability.PROCESS
) -> Iterator[FillableStore]:
    with small_disk(directory) as disk:
        yield FillableStore(disk.fill, disk.empty, lambda: on_disk(disk.path, durability))


@contextmanager
def synchronous_sqlite_store(directory: Path) -> Iterator[FillableStore]:
    with sqlite_store(directory, StoreDurability.MACHINE) as store:
        yield store


STORES = {
    "memory": memory_store,
    "sqlite": sqlite_store,
    "sqlite, machine": synchronous_sqlite_store,
}


@asynccontextmanager
async def on_disk(
    directory: Path, durability: StoreDurability = StoreDurability.PROCESS
) -> AsyncIterator[Caller]:
    store = open_store(f"sqlite:///{directory}/m.db", durability)
    async with running(store, restored_service(store, ServerSettings(), time.time())) as caller:
        yield caller


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(group_commit, "RETRY_SECONDS", 0.1)


def keys(count: int, name: str = "k") -> list[str]:
    return [f"{name}{i:060d}" for i in range(count)]


async def becomes(caller: Caller, status: int) -> str:
    """Ask /readyz alone, as a load balancer does; returns what it says."""
    deadline = time.monotonic() + PATIENCE
    while (reply := await caller.send("GET", "/readyz")).status != status:
        assert time.monotonic() < deadline, f"/readyz stays {reply.status}: {reply.body!r}"
        await asyncio.sleep(0.01)
    return reply.json.get("message", "")


async def measured(caller: Caller) -> dict[str, float]:
    lines = (await caller.send("GET", "/metrics")).body.decode().splitlines()
    return {
        name: float(value)
        for name, value in (
            line.split() for line in lines if line.startswith("hicache") and "{" not in line
        )
    }


async def found(caller: Caller, names: list[str]) -> int:
    reply = await caller.post("/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": names}]})
    assert reply.status == 200, reply
    return sum(slot >= 0 for slot in reply.json["scopes"][0]["slots"])


async def reserves(caller: Caller, name: str, count: int = 100) -> tuple[int, str]:
    reply = await caller.post(
        "/v2/reserve", {"scopes": [{"scope": "0:kv", "keys": keys(count, name)}]}
    )
    return reply.status, reply.json.get("code", "")


class LogRecorder:
    """In the place of a module's logger: one that was configured and used before is out of reach of
    `structlog.testing`."""

    def __init__(self, said: list[dict[str, Any]]) -> None:
        self._said = said

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **fields: self._said.append({"event": event, "level": level, **fields})


@contextmanager
def logged() -> Iterator[list[dict[str, Any]]]:
    """What the server logs about its store."""
    said: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for module in (group_commit, runtime):
            stack.enter_context(mock.patch.object(module, "_log", LogRecorder(said)))
        yield said


def events(said: list[Any]) -> list[str]:
    return [line["event"] for line in said]


@pytest.mark.parametrize("name", STORES)
async def test_a_store_without_room(tmp_path, name):
    """Changes are refused as long as `/readyz`, log and metrics say so, and no longer; lookups go
    on."""

    with STORES[name](tmp_path) as store:
        async with store.serving() as caller:
            await caller.post("/v2/initialize", SCOPE)
            assert (await caller.store("0:kv", keys(100))).status == 200
            await becomes(caller, 200)
            store.fill()
            if not store.keeps:
                assert await reserves(caller, "a") == (200, "")
                await becomes(caller, 200)
                return
            with logged() as said:
                assert await reserves(caller, "a") == (503, "unavailable")
                await becomes(caller, 503)
                for turn in range(20):
                    assert await reserves(caller, f"a{turn}") == (503, "unavailable")
                    assert (await caller.send("GET", "/readyz")).status == 503
                    await asyncio.sleep(0.02)
            assert events(said) == ["store_failing"], "one line for the episode"
            assert (await caller.send("GET", "/healthz")).status == 200
            assert await found(caller, keys(100)) == 100
            told = await measured(caller)
            assert (told["hicache_metadata_ready"], told["hicache_metadata_store_failing"]) == (
                0,
                1,
            )
            store.empty()
            with logged() as said:
                await becomes(caller, 200)
            assert events(said) == ["store_serving"]
            told = await measured(caller)
            assert (told["hicache_metadata_ready"], told["hicache_metadata_store_failing"]) == (
                1,
                0,
            )
            assert (await caller.store("0:kv", keys(10, "new"))).status == 200
        async with store.serving() as caller:
            assert await found(caller, keys(100) + keys(10, "new")) == 110
            assert (await caller.post("/v2/fsck", {})).json["problems"] == []


@pytest.mark.parametrize("durability", [StoreDurability.PROCESS, StoreDurability.MACHINE])
async def test_a_disk_that_is_full_during_a_compaction(tmp_path, durability):
    """The log still has room, the database has not: changes are refused, and what was acknowledged
    is there afterwards."""

    with small_disk(tmp_path) as disk:
        async with on_disk(disk.path, durability) as caller:
            await caller.post("/v2/initialize", SCOPE)
            assert (await caller.store("0:kv", keys(2000))).status == 200
            disk.fill(leave=8192)
            with logged() as said:
                why = await becomes(caller, 503)
                for turn in range(30):
                    assert await reserves(caller, f"a{turn}", 3) == (503, "unavailable")
            assert events(said) == ["store_failing"]
            assert said[0]["step"] == "compact"
            assert f"free space in {disk.path}" in why
            assert (await measured(caller))["hicache_metadata_store_failing"] == 1
            disk.empty()
            await becomes(caller, 200)
            assert (await caller.store("0:kv", keys(10, "new"))).status == 200
        async with on_disk(disk.path, durability) as caller:
            assert await found(caller, keys(2000) + keys(10, "new")) == 2010


async def test_a_server_ends_in_good_order_on_a_full_disk(tmp_path):
    with small_disk(tmp_path) as disk:
        with logged() as said:
            async with on_disk(disk.path) as caller:
                await caller.post("/v2/initialize", SCOPE)
                assert (await caller.store("0:kv", keys(100))).status == 200
                disk.fill()
                assert await reserves(caller, "a") == (503, "unavailable")
        assert events(said) == ["store_failing", "unwritten", "stopped"]
        disk.empty()
        async with on_disk(disk.path) as caller:
            assert await found(caller, keys(100)) == 100


async def test_a_start_on_a_full_disk_says_so_in_one_line_and_loses_nothing(tmp_path):
    with small_disk(tmp_path) as disk:
        address = f"sqlite:///{disk.path}/m.db"

        store = open_store(address)
        service = restored_service(store, ServerSettings(), NOW)
        service.initialize(p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=10_000)]), NOW)
        part = p.ReserveScope(scope="0:kv", keys=keys(2000))
        leases = service.reserve(p.Reserve(scopes=[part]), NOW).scopes[0].leases
        part = p.CommitScope(scope="0:kv", leases=leases, lengths=[1] * 2000, checksums=[7] * 2000)
        service.commit(p.Commit(scopes=[part]), NOW)
        store.write(service.take_changes())
        # Not closed: as after kill -9, but for the lock.
        store._lock.release()
        disk.fill()
        started = await asyncio.to_thread(run_program, *SERVE, "--store", address)
        assert started.returncode == 2, started.stderr
        assert len(started.stderr.strip().splitlines()) == 1, started.stderr
        assert f"{disk.path}/m.db" in started.stderr
        assert f"free space in {disk.path}" in started.stderr
        disk.empty()

        async with on_disk(disk.path) as caller:
            assert await found(caller, keys(2000)) == 2000
