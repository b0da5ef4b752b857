"""A store on a full disk: responses, logs and metrics, and recovery when there is room again; and
one in a process that can start no more threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.http import asgi
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.storage import group_commit, sqlite
from tests.metadata_server import services
from tests.metadata_server.full_disks import small_disk
from tests.metadata_server.http_calls import eventually, running_on_disk
from tests.metadata_server.protocol.peer import keys_of

SLOTS = 10_000
both = pytest.mark.parametrize("durability", [StoreDurability.PROCESS, StoreDurability.MACHINE])


@pytest.fixture(autouse=True)
def logs(monkeypatch, capture_log):
    """What the server logs about its store, which it tries again soon."""
    monkeypatch.setattr(group_commit, "RETRY_SECONDS", 0.1)
    return capture_log(group_commit, asgi)


def told(logs):
    """Events since the last call."""
    events = [entry["event"] for entry in logs]
    logs.clear()
    return events


async def becomes(caller, status):
    """Ask /readyz alone, as a load balancer does; returns what it says."""

    async def ready():
        reply = await caller.send("GET", "/readyz")
        return reply.status == status and reply

    return (await eventually(ready)).json.get("message", "")


async def is_refused(caller, name, count=100):
    reply = await caller.reserve("0:kv", keys_of(count, name))
    return (reply.status, reply.json.get("code", "")) == (503, "unavailable")


async def is_failing(caller):
    text = await caller.metrics()
    [ready] = [line for line in text.splitlines() if line.startswith("hicache_metadata_ready ")]
    failing = "hicache_metadata_store_failing 1.0" in text
    assert ready.endswith("0.0" if failing else "1.0")
    return failing


@both
@pytest.mark.parametrize(
    ("pages", "leave"), [(100, 0), (2000, 8192)], ids=["no room", "room for the log alone"]
)
async def test_a_store_without_room(tmp_path, logs, durability, pages, leave):
    """Changes are refused as long as `/readyz`, log and metrics say so, and no longer; lookups go
    on, and what was acknowledged is there afterwards. A compaction needs more room than the log."""
    with small_disk(tmp_path) as disk:
        async with running_on_disk(disk.path, durability) as caller:
            await caller.initialize("0:kv", slots=SLOTS)
            assert (await caller.store("0:kv", keys_of(pages))).status == 200
            disk.fill(leave=leave)
            assert leave or await is_refused(caller, "a")
            assert f"free space in {disk.path}" in await becomes(caller, 503)
            for turn in range(20):
                assert await is_refused(caller, f"a{turn}", 3)
                assert await caller.status_of("/readyz") == 503
                await asyncio.sleep(0.02)
            assert not leave or [entry.get("step") for entry in logs] == ["compact"]
            assert told(logs) == ["store_failing"], "one line for the episode"
            assert await caller.status_of("/healthz") == 200
            assert await caller.live("0:kv", keys_of(pages)) == keys_of(pages)
            assert await is_failing(caller)
            disk.empty()
            await becomes(caller, 200)
            assert told(logs) == ["store_serving"]
            assert not await is_failing(caller)
            assert (await caller.store("0:kv", keys_of(10, "new"))).status == 200
        async with running_on_disk(disk.path, durability) as caller:
            everything = keys_of(pages) + keys_of(10, "new")
            assert await caller.live("0:kv", everything) == everything
            assert (await caller.post("/v2/fsck", {})).json["problems"] == []


async def test_a_server_ends_in_good_order_on_a_full_disk(tmp_path, logs):
    with small_disk(tmp_path) as disk:
        async with running_on_disk(disk.path) as caller:
            await caller.initialize("0:kv", slots=SLOTS)
            assert (await caller.store("0:kv", keys_of(100))).status == 200
            disk.fill()
            assert await is_refused(caller, "a")
        assert told(logs) == ["store_failing", "unwritten", "stopped"]
        disk.empty()
        async with running_on_disk(disk.path) as caller:
            assert await caller.live("0:kv", keys_of(100)) == keys_of(100)


async def test_a_start_on_a_full_disk_serves_what_is_there(tmp_path):
    with small_disk(tmp_path) as disk:
        store, service = services.opened(disk.path)
        services.initialize(service, "0:kv", slots=SLOTS)
        services.commit(service, services.reserve(service, keys_of(2000)).leases)
        store.write(service.take_changes())
        services.killed(store)
        disk.fill()
        async with running_on_disk(disk.path) as caller:
            assert await caller.live("0:kv", keys_of(2000)) == keys_of(2000)
            assert await is_refused(caller, "a")
            assert f"free space in {disk.path}" in await becomes(caller, 503)
            disk.empty()
            await becomes(caller, 200)
            assert (await caller.store("0:kv", keys_of(10, "new"))).status == 200


async def test_no_block_is_compacted_with_changes_that_the_log_lacks(tmp_path, monkeypatch):
    """Its leases would be in a store whose counters do not know of them."""
    monkeypatch.setattr(sqlite, "MAX_LOG_BYTES", 1)
    async with running_on_disk(tmp_path) as caller:
        await caller.initialize("0:kv", slots=SLOTS)
        assert (await caller.reserve("0:kv", keys_of(100))).status == 200
        store, compacted = caller.app.store, []

        def fail(changes):
            raise StoreError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(store, "write", fail)
            broken.setattr(store, "compact", lambda batch, now: compacted.append(batch))
            assert await is_refused(caller, "a")
            for _ in range(5):
                await asyncio.sleep(0)
        assert compacted == []


@both
async def test_changes_are_written_and_checkpoints_are_made_without_a_new_thread(
    tmp_path, monkeypatch, durability
):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def checkpointed(caller, before):
        return caller.app.store.sizes()["database"] != before

    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 1000)
    async with running_on_disk(tmp_path, durability) as caller:
        before = caller.app.store.sizes()["database"]
        with monkeypatch.context() as limit:
            limit.setattr(threading.Thread, "start", refuse)
            assert (await caller.initialize("0:kv", slots=SLOTS)).status == 200
            assert (await caller.store("0:kv", keys_of(100))).status == 200
            await eventually(lambda: checkpointed(caller, before))
