"""Removals: when they are listed, and when something may be missing. `test_histories.py` has what is
listed, and how often."""

from __future__ import annotations

import asyncio

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core import removals, scope
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.storage import group_commit
from tests.metadata_server.http_calls import (
    SlowStore,
    eventually,
    running,
)
from tests.metadata_server.protocol.peer import Peer, keys_of, peer_on

REASON = p.RemovedBecause


async def collect(peer, cursor):
    part = p.RemovalCursor(scope=peer.scope, cursor=cursor)
    [found] = (await peer.call("/v2/removals", p.CollectRemovals(scopes=[part]))).scopes
    assert {len(found.keys)} == {len(found.reasons), len(found.times), len(found.by)}
    return found


class Listener:
    """Collects what is removed from now on."""

    def __init__(self, peer, cursor):
        self.peer, self.cursor = peer, cursor

    @classmethod
    async def on(cls, peer):
        first = await collect(peer, None)
        assert (first.keys, first.lost) == ([], False)
        return cls(peer, first.cursor)

    async def removed(self, *, lost=False):
        """Keys with their reasons, in order; more is asked for while there is more."""
        found, more = [], True
        while more:
            answer = await collect(self.peer, self.cursor)
            assert answer.lost == lost
            assert not answer.more or answer.keys
            found += zip(answer.keys, answer.reasons, strict=True)
            self.cursor, more, lost = answer.cursor, answer.more, False
        return found


async def test_many_come_in_several_answers(tmp_path):
    """MD-REM-1: the limit of keys counts all scopes together."""
    async with peer_on(f"sqlite:///{tmp_path}/m.db", keys=5) as peer:
        peers = [peer, peer.of("0:mamba")]
        cursors = []
        for one in peers:
            await one.initialize(16)
            cursors.append((await collect(one, None)).cursor)
            for key in "abcdefgh":
                await one.store([key])
                await one.delete([key])
        counts, found = [], {one.scope: [] for one in peers}
        while not counts or counts[-1]:
            parts = [
                p.RemovalCursor(scope=one.scope, cursor=cursor)
                for one, cursor in zip(peers, cursors, strict=True)
            ]
            answer = await peer.call("/v2/removals", p.CollectRemovals(scopes=parts))
            counts.append(sum(len(part.keys) for part in answer.scopes))
            for one, part in zip(peers, answer.scopes, strict=True):
                found[one.scope] += part.keys
                assert part.more == (len(found[one.scope]) < 8)
            cursors = [part.cursor for part in answer.scopes]
        assert counts == [5, 5, 5, 1, 0]
        assert set(map("".join, found.values())) == {"abcdefgh"}


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_is_listed_before_it_is_durable(monkeypatch, fails):
    """MD-REM-2."""
    monkeypatch.setattr(group_commit, "PATIENCE_SECONDS", 60.0)
    store = SlowStore()
    async with running(store) as caller:
        peer = Peer(caller)
        await peer.initialize(8)
        await peer.store(["a"])
        listener = await Listener.on(peer)
        store.gate.clear()
        going = p.Delete(scopes=[p.DeleteScope(scope=peer.scope, keys=["a"])])
        deleting = asyncio.create_task(peer.send("/v2/delete", going))
        await eventually(lambda: gone(peer, "a"))
        asked = p.CollectRemovals(
            scopes=[p.RemovalCursor(scope=peer.scope, cursor=listener.cursor)]
        )
        listing = asyncio.create_task(peer.send("/v2/removals", asked))
        await asyncio.sleep(0.1)
        assert not listing.done()
        store.error = StoreError("the disk is full") if fails else None
        store.gate.set()
        assert (await deleting).status == (503 if fails else 200)
        assert (await listing).status == (503 if fails else 200)
        store.error = None
        if fails:
            await eventually(lambda: answers(peer, asked))
        assert await listener.removed() == [("a", REASON.DELETED)]


async def gone(peer, key):
    return await peer.live([key]) == [False]


async def answers(peer, request):
    return (await peer.send("/v2/removals", request)).status == 200


async def test_a_cursor_of_another_start_is_lost(tmp_path):
    """MD-REM-3: what this start has removed follows; its own cursor is not lost."""
    address = f"sqlite:///{tmp_path}/m.db"
    async with peer_on(address) as peer:
        await peer.initialize(8)
        await peer.store(["a", "b", "c"])
        listener = await Listener.on(peer)
        await peer.delete(["a"])
    async with peer_on(address) as peer:
        listener.peer = peer
        await peer.delete(["b"])
        assert await listener.removed(lost=True) == [("b", REASON.DELETED)]
        await peer.delete(["c"])
        assert await listener.removed() == [("c", REASON.DELETED)]


@pytest.mark.parametrize("cursor", ["", "no cursor", "0.0", "\x00", "9" * 100, "\u0661"])
async def test_an_unknown_cursor_is_lost(peer, cursor):
    """MD-REM-3."""
    await peer.initialize(8)
    await peer.store(["a"])
    await peer.delete(["a"])
    mine = (await collect(peer, None)).cursor
    for unknown in (cursor, mine[:-1] + cursor if cursor else mine[:-1], f"{mine}0"):
        found = await collect(peer, unknown)
        assert (found.lost, found.keys) == (True, ["a"]), unknown


async def test_more_than_is_kept_is_lost(peer, monkeypatch):
    """MD-REM-3: and no sooner. The log itself has a test of its own; here, one clear."""
    for module in (removals, scope):
        monkeypatch.setattr(module, "MAX_KEPT", 8)
    await peer.initialize(100)
    listener = await Listener.on(peer)
    await peer.store(keys_of(8))
    await peer.clear()
    assert sorted(key for key, _ in await listener.removed()) == keys_of(8)
    await peer.store(keys_of(9, "n"))
    await peer.clear()
    kept = {key for key, _ in await listener.removed(lost=True)}
    assert len(kept) == 8
    assert kept < set(keys_of(9, "n"))
    assert await listener.removed() == []
