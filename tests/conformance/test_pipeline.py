"""The pipeline of the level stream: the rule that a race breaks, and who may bring an engine."""

from __future__ import annotations

import pytest

from hicache_conformance.fixtures.pipeline import HOST_MEMORY, broken_rule, wait_for
from hicache_conformance.fixtures.target import DriverTarget
from hicache_conformance.model.violation import Violation
from hicache_storage.pools import DevicePages, MHAHostPool
from hicache_storage.transfer import PageTransfers, StreamSimulator
from hicache_storage.transfer.races import Access, Race

KERNEL_READS, KERNEL_WRITES = "kernel that reads layer 0", "kernel that writes layer 0"
DEVICE = "bytes 0 to 8 of K of layer 0 on the device"
HOST = f"bytes 0 to 8 of {HOST_MEMORY}"


def access(what):
    return Access(what, "somewhere", 1, {1: 1})


@pytest.mark.parametrize(
    ("first", "second", "first_writes", "second_writes", "memory", "rule"),
    [
        (KERNEL_WRITES, "write-back", True, False, DEVICE, "ST-1"),
        (KERNEL_READS, "load", False, True, DEVICE, "ST-1"),
        ("write-back", KERNEL_WRITES, False, True, DEVICE, "ST-1"),
        ("write-back", "load", False, True, DEVICE, "ST-1"),
        ("load", KERNEL_READS, True, False, DEVICE, "ST-2"),
        ("load", KERNEL_WRITES, True, True, DEVICE, "ST-1"),
        ("write-back", "batch_set_v2", True, False, HOST, "ST-1"),
        ("load", "batch_get_v2", False, True, HOST, "ST-3"),
        ("write-back", "batch_get_v2", True, True, HOST, "ST-3"),
        ("load", "write-back", False, True, HOST, "ST-3"),
    ],
)
def test_the_rule_that_a_race_breaks(first, second, first_writes, second_writes, memory, rule):
    assert (
        broken_rule(Race(access(first), access(second), first_writes, second_writes, memory))
        == rule
    )


def test_waiting_ends():
    answers = iter([None, None, 3])
    assert wait_for(lambda: next(answers), "ST-1", "never") == 3
    with pytest.raises(Violation, match="ST-3: never"):
        wait_for(lambda: None, "ST-3", "never", seconds=0.01)


def test_a_target_copies_with_the_engine_of_the_sdk():
    import torch

    pool = MHAHostPool(
        size=4,
        page_size=2,
        layer_num=1,
        head_num=1,
        head_dim=4,
        dtype=torch.uint8,
        pin_memory=False,
    )
    pages = DevicePages([[torch.zeros(4, 1, 4, dtype=torch.uint8) for _ in "KV"]], 2)
    with StreamSimulator() as simulator:
        assert isinstance(
            DriverTarget().transfer_engine(simulator, simulator.stream("compute"), pages, pool),
            PageTransfers,
        )
