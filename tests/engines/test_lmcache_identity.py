"""The identity of LMCache's objects: what must keep them apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_storage.engines.engine_pool import EnginePool
from hicache_storage.engines.lmcache.identity import (
    ObjectLayout,
    Place,
    adapter_config,
    object_key,
    place_identity,
)

OPTIONS = {"driver": "file", "driver_config": {"path": "/data"}}
PLACE = {
    "model": "model",
    "kv_rank": 0x01000100,
    "group": 0,
    "layout": ObjectLayout.of([(2, 4, 64, 16)], ["torch.bfloat16"]),
}


def fingerprint(version="0.5", **changes):
    """Of a place and options, some of which are changed."""
    place = Place(**{name: changes.pop(name, value) for name, value in PLACE.items()})
    config = adapter_config({**OPTIONS, **changes})
    return place_identity(place, config, version=version).fingerprint("kv")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"kv_rank": 0x02000200},
        {"group": 1},
        # LMCache's own keys do not tell these.
        {"layout": ObjectLayout.of([(2, 4, 64, 16)], ["float16"])},
        {"layout": ObjectLayout.of([(2, 4, 16, 64)], ["bfloat16"])},
        {"layout": ObjectLayout.of([(4, 64, 16)] * 2, ["bfloat16"] * 2)},
        *({"revision": "2"}, {"salt": "s"}, {"tenant": "t"}, {"kv_dtype": "fp8"}),
        {"version": "0.6"},
    ],
)
def test_places_and_options_that_differ_share_nothing(changes):
    assert fingerprint(**changes) != fingerprint()


def test_salts_share_a_storage_and_no_key():
    """Clients choose them: with a storage each, some hundred take all descriptors."""
    chunks = [bytes([number]) * 32 for number in range(3)]
    salts = ["", "a", "b", "a" * 128, "\ud800"]
    names = {
        object_key(SimpleNamespace(chunk_hash=chunk, cache_salt=salt))
        for chunk in chunks
        for salt in salts
    }
    assert len(names) == len(chunks) * len(salts)
    assert {len(name) for name in names} == {64}
    assert chunks[0].hex() in names


def test_an_object_may_end_with_the_arena_and_no_later():
    arena = memoryview(bytearray(range(200)))
    pool = EnginePool(arena, stride=10, page_bytes=25, layout="lmcache")
    assert pool.geometry.size == 18
    [[last]] = pool.page_buffers([17])
    assert bytes(last) == bytes(range(170, 195))
    last[0] = 7
    assert arena[170] == 7
    assert EnginePool(arena, stride=10, page_bytes=300, layout="l").geometry.size == 0
