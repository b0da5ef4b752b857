"""The identity of LMCache's objects: what must keep them apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_storage.engines.lmcache.arena_pool import ArenaPool
from hicache_storage.engines.lmcache.identity import (
    ObjectLayout,
    Place,
    adapter_config,
    object_key,
    place_identity,
)
from hicache_storage.spec import ConfigError

OPTIONS = {"driver": "file", "driver_config": {"path": "/data"}}
PLACE = Place("model", 0x01000100, 0, ObjectLayout.of([(2, 4, 64, 16)], ["torch.bfloat16"]))


def fingerprint(place=PLACE, version="0.5", **options):
    config = adapter_config({**OPTIONS, **options})
    return place_identity(place, config, version=version).fingerprint("kv")


@pytest.mark.parametrize(
    "other",
    [
        PLACE._replace(model="other"),
        PLACE._replace(kv_rank=0x02000200),
        PLACE._replace(group=1),
        # LMCache's own keys do not tell these.
        PLACE._replace(layout=ObjectLayout.of([(2, 4, 64, 16)], ["float16"])),
        PLACE._replace(layout=ObjectLayout.of([(2, 4, 16, 64)], ["bfloat16"])),
        PLACE._replace(layout=ObjectLayout.of([(4, 64, 16)] * 2, ["bfloat16"] * 2)),
    ],
)
def test_places_that_differ_share_nothing(other):
    assert fingerprint(other) != fingerprint()


@pytest.mark.parametrize(
    "options",
    [{"revision": "2"}, {"salt": "s"}, {"tenant": "t"}, {"kv_dtype": "fp8"}, {"version": "0.6"}],
)
def test_options_that_differ_share_nothing(options):
    assert fingerprint(**options) != fingerprint()


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


def test_a_bad_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="unknown key 'drivr' in adapter_params; did you mean"):
        adapter_config({**OPTIONS, "drivr": "file"})


def test_an_object_may_end_with_the_arena_and_no_later():
    arena = memoryview(bytearray(range(200)))
    pool = ArenaPool(arena, align_bytes=10, page_bytes=25)
    assert pool.geometry.size == 18
    [[last]] = pool.page_buffers([17])
    assert bytes(last) == bytes(range(170, 195))
    last[0] = 7
    assert arena[170] == 7
    assert ArenaPool(arena, align_bytes=10, page_bytes=300).geometry.size == 0
