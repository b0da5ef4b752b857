"""The rules of the native part that no time has to pass for: messages, scopes, lookups, answers that
are repeated, and what operators ask. `test_histories.py` has those of pages and leases."""

from __future__ import annotations

import pytest

from hicache_metadata_server import protocol as p
from tests.metadata_server.protocol.peer import Written, keys_of


async def test_the_server_introduces_itself(peer):
    """MD-API-2."""
    about = await peer.call("/v2")
    assert about == await peer.call("/v2")
    assert about.protocol == p.PROTOCOL
    assert about.server
    assert about.instance
    limits = about.limits
    assert limits.min_lease_seconds <= limits.lease_seconds <= limits.max_lease_seconds
    assert limits.key_bytes >= 512


async def test_msgpack_says_the_same(peer):
    """MD-API-1: 64-bit checksums included, and refusals too; MD-LOOK-1: in any order and twice."""
    packed = peer.of(peer.scope)
    packed.content_type = p.MSGPACK
    assert await peer.initialize(16)
    assert not await packed.initialize(16)
    keys = keys_of(8)
    pages = [*await peer.store(keys[:4]), *await packed.store(keys[4:])]
    # Pages that were written together are answered in another way than others.
    for wanted in (pages, [*reversed(pages), Written("missing", p.NO_SLOT, 0, 0, 0, 0), *pages]):
        found = await peer.lookup([page.key for page in wanted])
        assert found == await packed.lookup([page.key for page in wanted])
        for name in ("slot", "generation", "length", "checksum"):
            assert getattr(found, f"{name}s") == [getattr(page, name) for page in wanted]
    unknown = p.Lookup(scopes=[p.LookupScope(scope="7:kv", keys=keys)])
    for one in (peer, packed):
        assert await one.refused("/v2/lookup", unknown, 404, "scopes[0].scope") == "unknown_scope"


async def test_several_scopes_in_a_call(peer):
    """MD-API-3: in their order, each with its own columns."""
    names, keys = ["0:kv", "0:mamba", "1:kv"], keys_of(5)
    for number, name in enumerate(names):
        await peer.of(name).initialize(8)
        # Slots of the scopes differ, so that answers in another order are seen.
        await peer.of(name).store(["x", "y"][:number])
    parts = [p.ReserveScope(scope=name, keys=keys[i:]) for i, name in enumerate(names)]
    leased = (await peer.call("/v2/reserve", p.Reserve(scopes=parts))).scopes
    parts = []
    for i, (name, one) in enumerate(zip(names, leased, strict=True)):
        columns = {"lengths": [10 + i] * (5 - i), "checksums": [i] * (5 - i)}
        parts.append(p.CommitScope(scope=name, leases=one.leases, **columns))
    await peer.call("/v2/commit", p.Commit(scopes=parts))
    asked = p.Lookup(scopes=[p.LookupScope(scope=name, keys=keys) for name in names])
    for i, one in enumerate((await peer.call("/v2/lookup", asked)).scopes):
        assert one.lengths == [0] * i + [10 + i] * (5 - i)
        assert one.slots[i:] == leased[i].slots
        assert one == await peer.of(names[i]).lookup(keys)


async def test_a_call_with_one_wrong_scope_does_nothing_in_the_others(peer):
    """MD-API-3 and MD-GEO-1."""
    await peer.initialize(8)
    await peer.store(["a"])
    names = [peer.scope, "9:kv"]
    sizes = [p.ScopeGeometry(scope=name, slots=8) for name in ("9:kv", peer.scope)]
    wrong = {
        "/v2/reserve": p.Reserve(scopes=[p.ReserveScope(scope=n, keys=["b"]) for n in names]),
        "/v2/delete": p.Delete(scopes=[p.DeleteScope(scope=n, keys=["a"]) for n in names]),
        "/v2/clear": p.Clear(scopes=names),
        "/v2/initialize": p.Initialize(scopes=sizes),
    }
    for path, request in wrong.items():
        field = {"/v2/clear": "", "/v2/initialize": ".slot_bytes"}.get(path, ".scope")
        status = 409 if path == "/v2/initialize" else 404
        await peer.refused(path, request, status, f"scopes[1]{field}")
        left = await peer.status()
        assert (left.live, left.leased) == (1, 0), path
        assert len((await peer.call("/v2/scopes")).scopes) == 1, path


async def test_another_geometry_is_refused(peer):
    """MD-GEO-1."""
    await peer.initialize(16)
    [page] = await peer.store(["a"])
    right = {"slots": 16, "slot_bytes": 4096, "geometry": "g", "identity": "identity"}
    others = {"slots": 17, "slot_bytes": 8192, "geometry": "layer_first", "identity": "other"}
    for field, value in others.items():
        part = p.ScopeGeometry(scope=peer.scope, **right | {field: value})
        refused = await peer.refused(
            "/v2/initialize", p.Initialize(scopes=[part]), 409, f"scopes[0].{field}"
        )
        assert refused == "mismatch"
    assert not await peer.initialize(16)
    assert (await peer.lookup(["a"])).slots == [page.slot]


async def test_a_lease_is_as_long_as_the_limits_allow(timed):
    """MD-LEASE-3."""
    await timed.initialize(4)
    limits = (await timed.call("/v2")).limits
    for key, asked, got in (
        ("a", None, limits.lease_seconds),
        ("b", 1e9, limits.max_lease_seconds),
        ("c", 1e-3, limits.min_lease_seconds),
    ):
        part = p.ReserveScope(scope=timed.scope, keys=[key])
        answer = await timed.call("/v2/reserve", p.Reserve(scopes=[part], lease_seconds=asked))
        assert answer.lease_seconds == got
        [status] = await timed.inspect([key])
        assert status.seconds_left == pytest.approx(got, abs=1e-3)


# Answers that are repeated.


async def test_an_idempotency_key_with_another_request(peer):
    """MD-IDEM-1: another body, or another route."""
    await peer.initialize(8)
    await peer.store(["a"])
    await peer.lease(["b"], once="a")
    part = p.ReserveScope(scope=peer.scope, keys=["c"])
    for path, request in (
        ("/v2/reserve", p.Reserve(scopes=[part])),
        ("/v2/clear", p.Clear(scopes=[peer.scope])),
    ):
        reply = await peer.send(path, request, once="a")
        assert (reply.status, reply.json["code"]) == (422, "key_reused")
    status = await peer.status()
    assert (status.live, status.leased) == (1, 1)


async def test_a_refused_request_leaves_its_idempotency_key_unused(peer):
    """MD-IDEM-1: what was not done may be done by the same request later."""
    part = p.ReserveScope(scope=peer.scope, keys=["a"])
    assert (await peer.send("/v2/reserve", p.Reserve(scopes=[part]), once="a")).status == 404
    await peer.initialize(8)
    reply = await peer.send("/v2/reserve", p.Reserve(scopes=[part]), once="a")
    assert reply.status == 200


# Operators.


async def test_scopes_are_listed(peer):
    """MD-OPS-1: with their geometry, and slots by state that add up."""
    await peer.initialize(12)
    await peer.store(keys_of(5))
    await peer.lease(["x", "y"])
    await peer.delete(keys_of(1))
    status = await peer.status()
    assert (status.slots, status.slot_bytes) == (12, 4096)
    assert (status.geometry, status.identity) == ("g", "identity")
    counts = (status.live, status.leased, status.quarantined, status.free)
    assert counts == (4, 2, 1, 5)


async def test_inspecting(peer):
    """MD-OPS-2: a live, a leased, a free and an unknown one, by slot and by key."""
    await peer.initialize(8)
    [page] = await peer.store(["live"])
    leased = await peer.lease(["held"], ["live"])
    free = next(slot for slot in range(8) if slot not in (page.slot, leased.slots[0]))
    found = await peer.inspect(["live", "held", "none"], [page.slot, leased.slots[0], free])
    live, held, unused, *by_key = found
    assert by_key == [live, held, None]
    assert (live.state, live.key, live.generation) == ("live", "live", page.generation)
    assert (live.length, live.checksum) == (page.length, page.checksum)
    assert (held.state, held.key, held.generation) == ("leased", "held", leased.generations[0])
    assert (held.owner, held.prefix) == ("test", "live")
    assert held.seconds_left > 0
    assert (unused.slot, unused.state, unused.key) == (free, "free", "")


async def test_draining(peer):
    """MD-OPS-4 and MD-OPS-5: no new leases, in either part; all else goes on."""
    await peer.initialize(8)
    [page] = await peer.store(["a"])
    kept, given = (await peer.lease(["b", "c"])).leases
    health = ("/healthz", "/readyz")
    assert [await peer.caller.status_of(path) for path in health] == [200, 200]
    drained = await peer.call("/v2/drain", p.Drain(enabled=True))
    assert (drained.enabled, drained.leases) == (True, 2)
    request = p.Reserve(scopes=[p.ReserveScope(scope=peer.scope, keys=["d"])])
    assert await peer.refused("/v2/reserve", request, 503) == "draining"
    assert await peer.reserve(["a", "d"]) == [(True, page.slot), (False, -1)]
    assert [await peer.caller.status_of(path) for path in health] == [200, 503]
    assert await peer.renew([kept, given], 30.0) == [True, True]
    assert await peer.commit([kept]) == [True]
    assert await peer.abort([given]) == [True]
    assert await peer.live(["a", "b"]) == [True, True]
    assert await peer.delete(["a"]) == [True]
    assert not (await peer.call("/v2/drain", p.Drain(enabled=False))).enabled
    assert (await peer.lease(["d"])).states == [p.Reserved.LEASED]
