"""From SGLang's storage config and KV pool to our configuration and identity; without SGLang."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch

from hicache_storage.engines.sglang.identity import (
    ENGINE_KEYS,
    bridge_config,
    check_engine,
    logical_dtype,
    model_variant,
    rank_labels,
    rank_number,
    storage_identity,
    unserved_reason,
)
from hicache_storage.spec import ConfigError, InvalidPoolError


@dataclass
class Engine:
    """The fields of `HiCacheStorageConfig`."""

    tp_rank: int = 0
    tp_size: int = 8
    pp_rank: int = 0
    pp_size: int = 2
    attn_cp_rank: int = 0
    attn_cp_size: int = 2
    dp_rank: int = 0
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "llama"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False

    @property
    def is_storage_writer(self) -> bool:
        """SGLang's own rule, said again."""
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class Anchor:
    layout: str = "page_first"
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    start_layer: int = 0
    end_layer: int = 31
    layer_num: int = 32


OPTIONS = {"interface_v1": 1, "driver": "file"}
CONFIG = bridge_config(OPTIONS)


def identity(engine: Engine | None = None, anchor: object = None, **options: object):
    config = bridge_config({**OPTIONS, **options})
    return storage_identity(engine or Engine(), config, anchor or Anchor())


class TestConfiguration:
    def test_engine_keys_are_accepted(self):
        assert bridge_config({**dict.fromkeys(ENGINE_KEYS, 1), **OPTIONS}) == CONFIG

    @pytest.mark.parametrize(
        "options", [None, {}, {"driver": "file"}, {"driver": "file", "interface_v1": 0}]
    )
    def test_interface_v1_is_needed(self, options):
        with pytest.raises(ConfigError, match=r'set "interface_v1": 1'):
            bridge_config(options)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"prefetch_treshold": 1}, "did you mean 'prefetch_threshold'"),
            ({"driver_config": "path"}, "driver_config"),
            ({"deadline_seconds": 0}, "deadline_seconds"),
            ({"tenant": 7}, "tenant"),
        ],
    )
    def test_a_bad_key_or_value_is_named(self, options, said):
        with pytest.raises(ConfigError, match=said):
            bridge_config({**OPTIONS, **options})

    @pytest.mark.parametrize(
        "fields",
        [
            {"tp_lcm_size": 8, "dcp_size": 2},
            {"model_name": None},
            {"model_name": ""},
        ],
    )
    def test_engines_that_cannot_be_served(self, fields):
        with pytest.raises(ConfigError):
            check_engine(replace(Engine(), **fields))


class TestIdentity:
    @pytest.mark.parametrize(
        ("version", "revision"), [("", "r"), ("default", "r"), ("2", '["r", "2"]')]
    )
    def test_a_version_of_the_weights_is_part_of_their_revision(self, version, revision):
        config = bridge_config({**OPTIONS, "revision": "r"})
        assert (
            storage_identity(Engine(), config, Anchor(), weight_version=version).revision
            == revision
        )

    def test_fields_that_decide_never_collide(self):
        """Findings D8 and D12: each of these is missing from the keys of at least one of SGLang's
        own drivers."""
        variants = {
            "nothing": identity(),
            "model": identity(Engine(model_name="qwen")),
            "tp_rank": identity(Engine(tp_rank=1)),
            "tp_size": identity(Engine(tp_size=4)),
            "pp_rank": identity(Engine(pp_rank=1)),
            "pp_size": identity(Engine(pp_size=4)),
            "cp_rank": identity(Engine(attn_cp_rank=1)),
            "cp_size": identity(Engine(attn_cp_size=4)),
            "replicated": identity(Engine(is_mla_model=True)),
            "other dcp_size": identity(Engine(is_mla_model=True, dcp_size=2)),
            "dcp_rank": identity(Engine(tp_rank=1, is_mla_model=True, dcp_size=2, dcp_rank=1)),
            "dcp_rank of a cp_rank": identity(
                Engine(tp_rank=1, is_mla_model=True, dcp_size=2, dcp_rank=1, attn_cp_rank=1)
            ),
            "dtype": identity(anchor=Anchor(dtype=torch.float16)),
            "layout": identity(anchor=Anchor(layout="layer_first")),
            "page size": identity(anchor=Anchor(page_size=32)),
            "layers": identity(anchor=Anchor(layer_num=16)),
            "first layer": identity(anchor=Anchor(start_layer=1, layer_num=31)),
            "tenant": identity(tenant="t"),
            "revision": identity(revision="r"),
            "salt": identity(salt="s"),
        }
        for (name, one), (other_name, other) in combinations(variants.items(), 2):
            assert one.fingerprint() != other.fingerprint(), f"{name} and {other_name} share pages"

    def test_dp_ranks_share(self):
        assert (
            identity(Engine(dp_rank=0)).fingerprint() == identity(Engine(dp_rank=3)).fingerprint()
        )

    @pytest.mark.parametrize("dcp_size", [1, 2, 4])
    def test_one_writer_for_each_dcp_shard_and_it_is_sglangs(self, dcp_size):
        fields = {"is_mla_model": True, "attn_cp_size": 1, "dcp_size": dcp_size}
        engines = [Engine(tp_rank=rank, dcp_rank=rank % dcp_size, **fields) for rank in range(8)]
        ranks = [identity(engine) for engine in engines]
        assert [rank.is_writer("kv") for rank in ranks] == [
            engine.is_storage_writer for engine in engines
        ]
        for pool in ("kv", "indexer"):
            shards = [rank.fingerprint(pool) for rank in ranks]
            assert len(set(shards)) == dcp_size
            assert all(shards[rank] == shards[rank % dcp_size] for rank in range(8))
        assert len({rank.fingerprint("mamba") for rank in ranks}) == 8
        assert all(rank.is_writer("mamba") for rank in ranks)

    def test_the_page_size_is_the_one_that_keys_count(self):
        anchor = SimpleNamespace(**vars(Anchor(page_size=32)), logical_page_size=64)
        assert identity(anchor=anchor).page_size == 64

    def test_a_pool_that_tells_no_layers(self):
        anchor = SimpleNamespace(layout="page_first", page_size=64, dtype=torch.bfloat16)
        who = identity(anchor=anchor)
        assert (who.layer_start, who.layer_end) == (0, 0)


def ranks_of(size: int, *, kv_heads: int, **engine: object):
    return [
        storage_identity(
            Engine(tp_rank=rank, tp_size=size, **engine), CONFIG, Anchor(), kv_heads=kv_heads
        )
        for rank in range(size)
    ]


class TestShards:
    """`tp_lcm_size`."""

    @pytest.mark.parametrize("kv_heads", [8, 0])
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_tp_sizes_that_divide_it_share(self, size, kv_heads):
        ranks = ranks_of(size, kv_heads=kv_heads, tp_lcm_size=4)
        [whole] = ranks_of(1, kv_heads=kv_heads, tp_lcm_size=4)
        assert [rank.fingerprint("kv", shard) for rank in ranks for shard in rank.shards("kv")] == [
            whole.fingerprint("kv", shard) for shard in range(4)
        ]

    @pytest.mark.parametrize(("lcm", "kv_heads", "shards"), [(8, 2, 2), (8, 8, 8), (4, 6, 2)])
    def test_a_shard_has_whole_heads(self, lcm, kv_heads, shards):
        assert ranks_of(2, kv_heads=kv_heads, tp_lcm_size=lcm)[0].store_tp_size == shards

    def test_heads_that_are_replicated_have_one_writer(self):
        ranks = ranks_of(8, kv_heads=2, tp_lcm_size=8)
        assert [rank.is_writer("kv") for rank in ranks] == [True, False, False, False] * 2
        assert [(rank.head_start, rank.head_end) for rank in ranks] == [(0, 1)] * 4 + [(1, 2)] * 4
        # Side pools may have other numbers of heads.
        assert all(not rank.shards(pool) for rank in ranks for pool in ("swa", "draft", "mamba"))

    @pytest.mark.parametrize(
        ("pool", "in_shards"),
        [("swa", True), ("draft", True), ("mamba", False), ("indexer", False)],
    )
    def test_side_pools(self, pool, in_shards):
        [*ranks] = ranks_of(2, kv_heads=8, tp_lcm_size=4)
        assert bool(ranks[0].shards(pool)) == in_shards
        plain = ranks_of(2, kv_heads=8)
        assert (ranks[1].fingerprint(pool) == plain[1].fingerprint(pool)) != in_shards

    def test_replicated_kv_and_engines_without_it_keep_their_pages(self):
        [plain] = ranks_of(1, kv_heads=8)
        assert plain == ranks_of(1, kv_heads=0)[0]
        for size in (1, 2):
            ranks = ranks_of(size, kv_heads=8, is_mla_model=True, tp_lcm_size=4)
            assert ranks == ranks_of(size, kv_heads=8, is_mla_model=True)


class TestDtype:
    def test_the_pools_own(self):
        assert logical_dtype(Anchor()) == "bfloat16"
        assert logical_dtype(Anchor(), "bfloat16") == "bfloat16"
        assert logical_dtype(Anchor(), engine_kv_dtype="auto") == "bfloat16"

    def test_a_contradiction(self):
        with pytest.raises(ConfigError, match="kv_dtype is 'fp8_e4m3'"):
            logical_dtype(Anchor(), "fp8_e4m3")

    def test_what_uint8_hides_is_told_by_the_operator_or_the_engine(self):
        hidden = Anchor(dtype=torch.uint8)
        assert logical_dtype(hidden, engine_kv_dtype="fp8_e5m2") == "fp8_e5m2"
        assert logical_dtype(hidden, "fp8_e4m3", "fp8_e5m2") == "fp8_e4m3"

    @pytest.mark.parametrize("engine_kv_dtype", ["", "auto"])
    def test_what_nobody_tells_is_refused(self, engine_kv_dtype):
        with pytest.raises(InvalidPoolError, match='set "kv_dtype"'):
            logical_dtype(Anchor(dtype=torch.uint8), engine_kv_dtype=engine_kv_dtype)


class TestPools:
    @pytest.mark.parametrize(
        ("pool", "name", "engine", "served"),
        [
            ({"head_num": 4}, "draft", {"is_mla_model": True}, False),
            ({"head_num": 4}, "draft", {"is_mla_model": True, "tp_size": 1}, True),
            ({"head_num": 4}, "draft", {"is_mla_model": False}, True),
            ({"head_num": 4}, "mamba", {"is_mla_model": True}, True),
            ({}, "indexer", {"is_mla_model": True}, True),
        ],
    )
    def test_side_pools_that_hold_heads_beside_replicated_kv(self, pool, name, engine, served):
        engine = replace(Engine(), **engine)
        assert (
            unserved_reason(engine, SimpleNamespace(**pool), name, identity(engine)) == ""
        ) == served


def test_ranks_of_one_engine_have_ports_of_their_own():
    ranks = [
        Engine(tp_rank=tp, tp_size=4, pp_rank=pp, attn_cp_rank=cp, dp_rank=dp)
        for dp, pp, cp, tp in product(range(2), range(2), range(2), range(4))
    ]
    assert [rank_number(rank) for rank in ranks] == list(range(32))
    labels = {"model_name": "llama", "tp_rank": "3", "pp_rank": "0", "dp_rank": "0"}
    assert rank_labels(ranks[7]) == labels


def test_replicas_of_plain_dp_have_ports_of_their_own():
    """SGLang gives each of them the `dp_rank` 0; that of DP attention counts as it is."""
    plain = {"pp_size": 1, "attn_cp_size": 1}
    ranks = [
        (Engine(tp_rank=tp, tp_size=2, **plain), replica) for replica in range(3) for tp in range(2)
    ]
    assert [rank_number(*rank) for rank in ranks] == list(range(6))
    assert [rank_labels(*rank)["dp_rank"] for rank in ranks] == ["0", "0", "1", "1", "2", "2"]
    attention = [Engine(tp_size=1, dp_rank=dp, **plain) for dp in range(3)]
    assert [rank_number(rank, rank.dp_rank) for rank in attention] == [0, 1, 2]


class TestVariants:
    """Options of the engine that change the KV of a prompt, and neither the model's name nor its
    weights."""

    def revision(self, version="", declared="", **options):
        config = bridge_config({**OPTIONS, "revision": declared})
        found = storage_identity(
            Engine(),
            config,
            Anchor(),
            weight_version=version,
            variant=model_variant(SimpleNamespace(**options)),
        )
        return found.revision

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"json_model_override_args": "{}", "quantization_param_path": None},
            {"json_model_override_args": " { } ", "quantization_param_path": ""},
            {"json_model_override_args": None},
        ],
    )
    def test_without_any_the_namespace_stays_the_one_it_was(self, options):
        assert self.revision(**options) == ""
        assert self.revision(declared="r", **options) == "r"
        assert self.revision("2", "r", **options) == '["r", "2"]'

    def test_overrides_of_the_models_configuration(self):
        scaled = '{"rope_scaling": {"type": "yarn", "factor": 4.0}}'
        revisions = {
            self.revision(version, declared, json_model_override_args=given)
            for version in ("", "2")
            for declared in ("", "r")
            for given in ("{}", scaled, scaled.replace("4.0", "2.0"))
        }
        assert len(revisions) == 12
        again = '{"rope_scaling": {"factor": 4.0,  "type": "yarn"}}'
        assert self.revision(json_model_override_args=scaled) == self.revision(
            json_model_override_args=again
        )

    def test_scales_of_fp8_kv_by_what_is_in_their_file(self, tmp_path):
        one, copy, other = tmp_path / "one.json", tmp_path / "copy.json", tmp_path / "other.json"
        one.write_text('{"kv_cache": 1}')
        copy.write_text('{"kv_cache": 1}')
        other.write_text('{"kv_cache": 2}')
        revisions = [
            self.revision(quantization_param_path=str(path)) for path in (one, copy, other)
        ]
        assert revisions[0] == revisions[1] != revisions[2]
        assert "" not in revisions

    def test_scales_that_cannot_be_read(self, tmp_path):
        with pytest.raises(ConfigError, match=r"quantization-param-path.*No such file"):
            self.revision(quantization_param_path=str(tmp_path / "none.json"))
