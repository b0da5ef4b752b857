"""The identity of vLLM's chunks: what must keep them apart, and what must not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hicache_storage.engines.vllm.identity import pool_names, row_bytes, tier_config, tier_identity
from hicache_storage.spec import ConfigError, InvalidIdentityError

OPTIONS = {"driver": "file", "driver_config": {"path": "/data"}}
BUILD = {"vllm": "0.32", "device": "cuda 9.0"}


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("a", "b")
    group_id: int = 0


@dataclass(frozen=True)
class Model:
    name: str = "llama"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 4


@dataclass(frozen=True)
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    is_parallelism_agnostic: bool = True


@dataclass(frozen=True)
class Engine:
    groups: tuple[Group, ...] = (Group(),)
    worker_kv_bytes_per_block: int = 1000
    model: Model = Model()
    cache: Cache = Cache()
    parallel: Parallel = Parallel()
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


def fingerprint(engine=None, *, build=BUILD, **options):
    config = tier_config({**OPTIONS, **options})
    identity = tier_identity(engine or Engine(), config, replicated=False, build=build)
    return identity.fingerprint("kv")


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ({"model": Model(name="other")}, {}),
        ({"model": Model(dtype="float16")}, {}),
        ({"groups": (Group(tokens_per_block=32),)}, {}),
        ({"groups": (Group(layer_names=("a", "c")),)}, {}),
        ({"groups": (Group(group_id=1),)}, {}),
        ({"groups": (Group(layer_names=("a",)), Group(layer_names=("b",), group_id=1))}, {}),
        ({"cache": Cache(blocks_per_chunk=8)}, {}),
        ({"cache": Cache(tokens_per_hash=32)}, {}),
        ({"kv_cache_layout": "LBNHC"}, {}),
        ({"kv_cache_layout": None}, {}),
        ({"canonical_layout": True}, {}),
        ({"parallel": Parallel(world_size=4, tp_size=4)}, {}),
        ({"parallel": Parallel(tp_size=1, pp_size=2)}, {}),
        ({"parallel": Parallel(tp_size=1, pcp_size=2)}, {}),
        ({"parallel": Parallel(tp_size=1, dcp_size=2)}, {}),
        ({}, {"revision": "2"}),
        ({}, {"salt": "s"}),
        ({}, {"tenant": "t"}),
        ({}, {"kv_dtype": "fp8_e5m2"}),
        ({}, {"build": {**BUILD, "vllm": "0.33"}}),
        ({}, {"build": {**BUILD, "device": "cpu AVX2"}}),
    ],
)
def test_what_differs_shares_nothing(engine, options):
    assert fingerprint(Engine(**engine), **options) != fingerprint() == fingerprint(Engine())


def test_tp_sizes_share_in_the_canonical_layout_alone():
    def of(tp_size, *, canonical, agnostic):
        parallel = Parallel(world_size=tp_size, tp_size=tp_size, is_parallelism_agnostic=agnostic)
        return fingerprint(Engine(parallel=parallel, canonical_layout=canonical))

    assert of(1, canonical=True, agnostic=True) == of(2, canonical=True, agnostic=True)
    assert of(1, canonical=True, agnostic=False) != of(2, canonical=True, agnostic=False)
    # vLLM says so of rows whose bytes depend on the TP size.
    assert of(1, canonical=False, agnostic=True) != of(2, canonical=False, agnostic=True)


def test_a_row_has_each_worker_once_unless_all_hold_the_same():
    assert row_bytes(Engine(), replicated=False) == 2 * 4 * 1000
    assert row_bytes(Engine(), replicated=True) == 4 * 1000


@pytest.mark.parametrize(
    ("numbers", "names"),
    [((0, 1, 2), ["kv", "group_1", "group_2"]), ((2, 5), ["kv", "group_5"]), ((7,), ["kv"])],
)
def test_each_group_has_a_pool_by_its_number_which_keys_have(numbers, names):
    groups = [Group(group_id=number) for number in numbers]
    assert pool_names(groups) == dict(zip(numbers, names, strict=True))


def test_groups_that_vllm_leaves_out_keep_engines_apart():
    def of(*numbers):
        groups = tuple(
            Group(layer_names=(str(place),), group_id=number)
            for place, number in enumerate(numbers)
        )
        return fingerprint(Engine(groups=groups))

    assert len({of(0, 1), of(0, 2), of(1, 2)}) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pth": "/data"}, "the entry of secondary_tiers: unknown option 'pth'"),
        ({"on_reset": "clear"}, "on_reset"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        tier_config({**OPTIONS, **options})


def test_an_engine_without_a_model_is_refused():
    with pytest.raises(InvalidIdentityError, match="model must not be empty"):
        fingerprint(Engine(model=Model(name="")))
