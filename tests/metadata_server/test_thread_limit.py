"""A server in a process that can start no more threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.server import restored_service
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage import sqlite
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.http_calls import running

SCOPE = {"scopes": [{"scope": "0:kv", "slots": 10_000}]}
KEYS = [f"{number:064d}" for number in range(100)]


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("durability", [StoreDurability.PROCESS, StoreDurability.MACHINE])
async def test_changes_are_written_and_checkpoints_are_made(tmp_path, monkeypatch, durability):
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 1000)
    store = open_store(f"sqlite:///{tmp_path}/m.db", durability)
    async with running(store, restored_service(store, ServerSettings(), time.time())) as caller:
        before = store.sizes()["database"]
        with monkeypatch.context() as limit:
            limit.setattr(threading.Thread, "start", refuse)
            async with asyncio.timeout(20):
                assert (await caller.post("/v2/initialize", SCOPE)).status == 200
                assert (await caller.store("0:kv", KEYS)).status == 200
                while store.sizes()["database"] == before:
                    await asyncio.sleep(0.01)
