"""Removals: what is listed, how often, when, and when something may be missing."""

from __future__ import annotations

import asyncio

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core import removals, scope
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from tests.metadata_server.http_calls import (
    SlowStore,
    eventually,
    running,
    running_shared,
    serves,
)
from tests.metadata_server.protocol.peer import QUARANTINE, Peer, keys_of, peer_on
from tests.metadata_server.redis_servers import redis_server

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


async def test_each_page_that_goes_is_listed_once(peer):
    """MD-REM-1: by both parts, with its reason."""
    await peer.initialize(8)
    await peer.make(8)
    keys = keys_of(8)
    pages = await peer.store(keys)
    listener, late = await Listener.on(peer), await Listener.on(peer)
    assert await peer.delete([keys[0], "none"]) == [True, False]
    generations = [pages[1].generation, pages[2].generation + 1]
    assert await peer.delete(keys[1:3], generations) == [True, False]
    await peer.sglang("delete_keys", 204, keys=[keys[3], "none"])
    gone = [(keys[0], REASON.DELETED), (keys[1], REASON.DAMAGED), (keys[3], REASON.DELETED)]
    assert await listener.removed() == gone
    assert await listener.removed() == []
    assert await peer.clear() == 5
    cleared = {(keys[i], REASON.CLEARED) for i in (2, 4, 5, 6, 7)}
    found = await listener.removed()
    assert (set(found), len(found)) == (cleared, 5)
    assert await late.removed() == [*gone, *found]
    assert await (await Listener.on(peer)).removed() == []


async def test_removals_name_the_owner_in_their_request(timed):
    """MD-REM-1: the compatible part has no owners."""
    await timed.initialize(2)
    await timed.store(["a"])
    await timed.store(["b"])
    listener = await Listener.on(timed)
    began = timed.clock.now
    await timed.lease(["c"])
    timed.wait(QUARANTINE)
    # A page that is stored again can go again.
    await timed.store(["a"])
    await timed.reserve(["d"])
    found = await collect(timed, listener.cursor)
    assert (found.keys, found.reasons) == (["a", "b"], [REASON.EVICTED] * 2)
    assert (found.by, found.times) == (["test", ""], [began, began + QUARANTINE])
    part = p.DeleteScope(scope=timed.scope, keys=["a"])
    await timed.call("/v2/delete", p.Delete(scopes=[part], owner="deleter"))
    timed.wait(QUARANTINE)
    await timed.store(["b"])
    await timed.call("/v2/clear", p.Clear(scopes=[timed.scope], owner="clearer"))
    found = await collect(timed, found.cursor)
    assert (found.keys, found.by) == (["a", "b"], ["deleter", "clearer"])


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
async def test_nothing_is_listed_before_it_is_durable(fails):
    """MD-REM-2."""
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


async def test_a_cursor_of_another_owner_is_lost(tmp_path):
    """MD-REM-3: servers that share a store send the request to the owner."""
    peers = {}
    with redis_server(tmp_path) as redis:
        async with running_shared(redis.url, DEFAULTS, name="http://two", peers=peers) as two:
            async with running_shared(redis.url, DEFAULTS, name="http://one", peers=peers) as one:
                await Peer(one).initialize(8)
                await Peer(one).store(["a", "b"])
                listener = await Listener.on(Peer(two))
                await Peer(one).delete(["a"])
                assert await listener.removed() == [("a", REASON.DELETED)]
            del peers["http://one"]
            await eventually(lambda: serves(two, "0:kv"))
            await Peer(two).delete(["b"])
            assert await listener.removed(lost=True) == [("b", REASON.DELETED)]


async def test_a_cursor_of_a_scope_that_was_dropped_is_lost(timed):
    """MD-REM-3: also where the new one has had as many removals."""
    await timed.initialize(8)
    await timed.store(["a"])
    await timed.delete(["a"])
    listener = await Listener.on(timed)
    timed.wait()
    await timed.call("/v2/drop", p.Drop(scopes=[timed.scope]))
    await timed.initialize(8)
    await timed.store(["b"])
    await timed.delete(["b"])
    assert await listener.removed(lost=True) == [("b", REASON.DELETED)]


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
