"""What is refused on one rank is refused on all, at once, and before anything is made."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from unittest import mock

import pytest

from hicache_storage.hybrid import HybridCacheController, ParallelConfig, PrefetchRules
from hicache_storage.hybrid.ranks import check_consistent
from hicache_storage.hybrid.stack.stack import build_pools
from hicache_storage.spec import ConfigError, HiCacheError, StorageUnavailableError
from hicache_storage.testing import MemoryStorage
from tests.hybrid.stack import PAGE, build, mamba_config
from tests.hybrid.storages import is_closed


class Together:
    """Lets ranks that are threads agree; one that ends early fails the others."""

    def __init__(self, size):
        self.size = size
        self._said = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size)

    def of(self, rank):
        return mock.Mock(size=self.size, all_reduce_min=lambda values: self._minimum(rank, values))

    def _minimum(self, rank, values):
        self._said[rank] = list(values)
        self._barrier.wait(60)
        found = [min(column) for column in zip(*self._said, strict=True)]
        self._barrier.wait(60)
        return found


def on_ranks(work, size=2):
    """What `work(rank, rank_group)` returned or raised on each of the ranks."""
    together, found = Together(size), [None] * size

    def run(rank):
        try:
            found[rank] = work(rank, together.of(rank))
        except BaseException as error:  # noqa: BLE001 - it is what came of the rank
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_what_differs_is_named():
    """Any two values can be told apart."""
    told = [
        {"a": 1, "b": True, "c": [1], "d": None, "e": 3},
        {"a": 2**64, "b": "True", "c": (1,), "d": -1, "e": 3},
    ]
    first, second = on_ranks(lambda rank, rank_group: check_consistent(rank_group, told[rank]))
    assert str(first) == "ranks differ in a (1 here), b, c, d; make it the same on every rank"
    named = f"ranks differ in a ({2**64} here), b, c, d (-1 here)"
    assert str(second) == f"{named}; make it the same on every rank"


# Stacks
# ---------------------------------------------------------------------------------------------------------------


def configs(rank, kind=mamba_config, **changes):
    return kind(parallel=ParallelConfig.of_rank(rank, tp_size=2), **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_tokens": 8 * PAGE}, r"device_tokens \((64|32) here\)"),
        ({"device_states": 4}, r"device_states \([84] here\)"),
        ({"host_tokens": 8 * PAGE}, r"host_tokens \((64|32) here\)"),
        ({"host_states": 4}, r"host_states \([84] here\)"),
        ({"checkpoint_interval": 16}, r"checkpoint_grid \((8|16) here\)"),
        ({"layout": "layer_first"}, "layout"),
        ({"write_policy": "write_back"}, "write_policy"),
        ({"prefetch": PrefetchRules(threshold_tokens=9)}, "prefetch"),
        ({"mamba": None, "device_states": 0, "host_states": 0}, r"pools, checkpoint_grid.*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_ranks_of_other_configs_are_refused(change, message):
    """Before anything is allocated."""
    with mock.patch("hicache_storage.hybrid.stack.stack.build_pools") as build_pools:
        found = on_ranks(
            lambda rank, rank_group: build(
                configs(rank, **(change if rank else {})), rank_group=rank_group
            )
        )
    assert not build_pools.called
    for error in found:
        assert isinstance(error, ConfigError), error
        assert re.fullmatch(
            f"ranks differ in {message}; make it the same on every rank", str(error)
        ), error


def pools(config, *arguments):
    if config.parallel.tp_rank:
        raise SystemExit(1)
    return build_pools(config, *arguments)


def test_pools_that_cannot_be_made_are_made_on_no_rank():
    with mock.patch("hicache_storage.hybrid.stack.stack.build_pools", pools):
        first, second = on_ranks(
            lambda rank, rank_group: build(configs(rank), rank_group=rank_group)
        )
    assert str(first) == "another rank could not make its pools"
    assert isinstance(second, SystemExit)


FIELDS = {"model": "m", "kv_dtype": "int16"}
SHARED = ("model", "kv_dtype", "revision", "tenant", "adapter", "salt")


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        *[({name: "other"}, [f"ranks differ in {name}; make it the same"] * 2) for name in SHARED],
        ({"layout": "layer_first"}, ["another rank refuses", "identity has layout='layer_first'"]),
    ],
)
def test_storages_that_differ_are_attached_on_no_rank(change, messages):
    def attach(rank, rank_group):
        config = configs(rank)
        identity = replace(config.identity(**FIELDS), **(change if rank else {}))
        with build(config, rank_group=rank_group) as stack:
            stack.attach(MemoryStorage(identity))

    for error, message in zip(on_ranks(attach), messages, strict=True):
        assert isinstance(error, HiCacheError)
        assert message in str(error)


@pytest.mark.parametrize(
    ("differs", "rules", "message"),
    [
        ({}, PrefetchRules(threshold_tokens=1), "prefetch rules"),
        ({"states": 0}, None, "pools, slots of host pools, slots of device pools"),
        ({"pages": 17}, None, "slots of host pools, slots of device pools"),
    ],
)
def test_controllers_of_other_pools_or_rules_are_refused(make_stack, differs, rules, message):
    """They would wait for each other later."""
    stacks = [make_stack(), make_stack(**differs)]

    def make(rank, rank_group):
        HybridCacheController(
            stacks[rank].group,
            stacks[rank].transfers,
            rules=rules if rank else None,
            parallel=ParallelConfig.of_rank(rank, tp_size=2),
            rank_group=rank_group,
        )

    for error in on_ranks(make):
        assert str(error) == f"ranks differ in {message}; make it the same on every rank"


def test_a_storage_is_attached_to_all_controllers_or_none(make_stack, store):
    """Also where the rank on which it fails is not the first."""

    def attach(rank, rank_group):
        parallel = ParallelConfig.of_rank(rank, tp_size=2)
        stack = make_stack(parallel=parallel, rank_group=rank_group)
        storages = [store.open(tp_size=2, tp_rank=rank) for _ in range(2)]
        if rank:
            storages[0].register_mem_host_pool_v2 = mock.Mock(side_effect=RuntimeError("no"))
        try:
            stack.controller.attach(storages[0])
        except Exception as error:  # noqa: BLE001 - it is what is compared
            refused = type(error)
        assert is_closed(storages[0])
        assert not stack.controller.attached
        stack.controller.attach(storages[1])
        return refused

    assert on_ranks(attach) == [StorageUnavailableError, RuntimeError]
