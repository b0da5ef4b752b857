"""Configs of stacks: what is wrong is refused by name, before anything is allocated; what is left
out follows from the rest."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from hicache_storage.hybrid import ParallelConfig, StackConfig, WritePolicy
from hicache_storage.spec import ConfigError
from tests.hybrid.stack import (
    ATTENTION,
    GRID,
    INDEX_KEYS,
    LATENT,
    PAGE,
    STATES,
    dsa_config,
    mamba_config,
)

COMMON_FAULTS = [
    ({"page_size": 0}, "page_size must be a whole number from 1 on, got 0"),
    ({"page_size": 4.0}, "page_size must be a whole number from 1 on, got 4.0"),
    (
        {"device_tokens": 10},
        r"device_tokens must be a multiple of page_size \(4\), got 10; pass 12",
    ),
    ({"device_tokens": 0}, "device_tokens must be a whole number from 1 on, got 0"),
    ({"host_tokens": 7}, r"host_tokens must be a multiple of page_size \(4\), got 7; pass 8"),
    ({"host_tokens": "64GiB"}, "host_tokens must be a whole number from 1 on, got '64GiB'"),
    (
        {"layout": "token_first"},
        "layout must be one of layer_first, page_first, .*; got 'token_first'",
    ),
    ({"device": "gpu"}, "device must name a torch device such as 'cuda:0' or 'cpu', got 'gpu'"),
    ({"device": "meta"}, "device must be of kind cuda or cpu, got 'meta'"),
    ({"write_policy": "never"}, "write_policy must be one of write_through, .*; got 'never'"),
    ({"storage_call_seconds": 0}, "storage_call_seconds must be positive, got 0"),
    ({"parallel": 2}, "parallel must be .*ParallelConfig.*, got 2"),
    ({"prefetch": "timeout"}, "prefetch must be .*PrefetchRules.*, got 'timeout'"),
    ({"attention": INDEX_KEYS}, "attention must be .*MLAGeometry, got IndexerGeometry"),
    ({"mamba": INDEX_KEYS}, "mamba must be .*MambaGeometry | None, got IndexerGeometry"),
    ({"indexer": LATENT}, "indexer must be .*IndexerGeometry | None, got MLAGeometry"),
    ({"stop_seconds": float("nan")}, "stop_seconds must be positive, got nan"),
]


@pytest.mark.parametrize("make", [mamba_config, dsa_config])
@pytest.mark.parametrize(
    ("fields", "message"), COMMON_FAULTS, ids=[next(iter(fields)) for fields, _ in COMMON_FAULTS]
)
def test_a_bad_field_is_named(make, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (
            mamba_config,
            {"device_states": 0},
            "device_states must be a whole number from 1 on, got 0",
        ),
        (mamba_config, {"host_states": 0}, "host_states must be a whole number from 1 on, got 0"),
        (
            mamba_config,
            {"checkpoint_interval": 0},
            "checkpoint_interval must be a whole number from 1 on, got 0",
        ),
        (
            mamba_config,
            {"attention": replace(ATTENTION, layers=(0, 1))},
            r"mamba.layers and attention.layers both have \[1\]",
        ),
        (
            dsa_config,
            {"indexer": replace(INDEX_KEYS, layers=(0, 1))},
            r"indexer.layers has \[1\], which attention.layers has not",
        ),
        (
            dsa_config,
            {"device_states": 2},
            "device_states is given without mamba, whose slots it counts",
        ),
        (
            dsa_config,
            {"layout": "page_head"},
            "layout must be one of layer_first, page_first, page_first_direct; got 'page_head'",
        ),
    ],
)
def test_what_contradicts_the_model_is_named(make, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


def test_checkpoints_are_where_a_page_and_a_chunk_end():
    states = replace(STATES, state_chunk=6)
    assert mamba_config(mamba=states, checkpoint_interval=GRID).checkpoint_grid == 24
    assert dsa_config().checkpoint_grid is None


def test_a_side_pool_has_the_layout_of_kv_if_it_knows_it():
    assert mamba_config(layout="layer_first").layout_of("mamba") == "layer_first"
    config = mamba_config(layout="page_head")
    assert (config.layout_of("kv"), config.layout_of("mamba")) == ("page_head", "page_first")


def test_text_is_taken_for_a_policy():
    assert mamba_config(write_policy="write_back").write_policy is WritePolicy.WRITE_BACK


@pytest.mark.parametrize(
    ("config", "dtype", "replicated"),
    [
        (
            mamba_config(layout="page_head", parallel=ParallelConfig(tp_rank=1, tp_size=2)),
            "int16",
            False,
        ),
        (dsa_config(parallel=ParallelConfig(tp_rank=1, tp_size=2)), "int16", True),
    ],
    ids=["mamba", "dsa"],
)
def test_the_identity_follows_from_the_config(config, dtype, replicated):
    identity = config.identity("m", revision="r", tenant="t", adapter="a", salt="s")
    assert (
        identity.model,
        identity.revision,
        identity.tenant,
        identity.adapter,
        identity.salt,
    ) == ("m", "r", "t", "a", "s")
    assert (identity.kv_dtype, identity.page_size, identity.layout) == (dtype, PAGE, config.layout)
    assert (identity.tp_rank, identity.tp_size, identity.kv_replicated) == (1, 2, replicated)
    assert config.identity("m", kv_dtype="fp8_e4m3").kv_dtype == "fp8_e4m3"
    assert identity.is_writer("mamba")
    assert identity.is_writer("kv") is not replicated


def test_heads_that_all_ranks_hold_are_written_once():
    single = replace(ATTENTION, head_num=1, replicated=True)
    assert mamba_config(attention=single).identity("m").kv_replicated
    assert mamba_config(attention=LATENT).identity("m").kv_replicated


def test_the_guide_names_every_field():
    guide = (Path(__file__).parents[2] / "docs" / "hybrid-stack.md").read_text()
    assert [field.name for field in fields(StackConfig) if field.name not in guide] == []
