"""What cases measure with: memory while a call runs, calls of a driver and their steps."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from hicache_conformance.cases.budget import forecast
from hicache_conformance.harness import memory_peak
from hicache_conformance.harness.driver_calls import CallSteps, counted, has_steps
from hicache_conformance.harness.memory_peak import transient_bytes
from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import Capabilities, StorageIdentity
from hicache_storage.testing import BytePool

MIB = 1 << 20


class Silent(ObjectStorage):
    """Has nothing."""

    def objects_exist(self, batches, call):
        return [[False] * len(batch.keys) for batch in batches]

    def read_objects(self, batches, call):
        return [[False] * len(batch.reads) for batch in batches]

    def write_objects(self, batches, call):
        return [[False] * len(batch.writes) for batch in batches]


@pytest.fixture
def storage():
    identity = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=2, layout="page_first")
    with Silent(identity, driver_name="silent", capabilities=Capabilities(may_hang=False)) as made:
        yield made


def with_mapping():
    mapping = mmap.mmap(-1, 32 * MIB)
    mapping.write(bytes([1]) * (32 * MIB))
    mapping.close()


@pytest.mark.parametrize(
    "stage",
    [
        lambda: len(bytearray(32 * MIB)),
        lambda: len([bytes([1]) * MIB for _ in range(32)]),
        with_mapping,
    ],
    ids=["bytearray", "bytes", "mapping"],
)
def test_memory_that_a_call_needs_is_seen(stage):
    assert transient_bytes([stage] * 2) >= 30 * MIB


def test_memory_of_tensors_is_seen():
    def stage():
        return torch.ones(64 * MIB, dtype=torch.uint8)

    # What the allocator has kept of freed tensors was resident before and does not count. A tensor
    # that is held takes it, so that a later one comes from the kernel. The same helps where a
    # machine that is short of memory takes pages from this process meanwhile, which hides some.
    held = []
    for _ in range(12):
        if transient_bytes([stage]) >= 30 * MIB:
            break
        held.append(stage())
    else:
        pytest.fail("tensors of 64 MiB were not seen in any of 12 attempts")


@pytest.mark.parametrize(
    ("resident", "peak", "after", "needed"),
    [
        (100, 132, 100, 32),
        (100, 132, 132, 0),
        (100, 148, 132, 16),
        (100, 132, 90, 32),
        (100, 100, 60, 0),
    ],
    ids=["given back", "kept", "a half kept", "more given back", "taken by the machine"],
)
def test_resident_memory_counts_beyond_before_and_after(monkeypatch, resident, peak, after, needed):
    shown = {"VmRSS:": iter([resident * MIB, after * MIB]), "VmHWM:": iter([peak * MIB])}
    monkeypatch.setattr(memory_peak, "_status", lambda field: next(shown[field]))
    assert round(transient_bytes([lambda: None]) / MIB) == needed


def test_what_stays_and_a_reused_buffer_are_not_counted():
    kept, buffers = [], []

    def reuse():
        if not buffers:
            buffers.append(bytearray(32 * MIB))
        else:
            buffers[0][:] = memoryview(buffers[0])

    assert transient_bytes([lambda: kept.append(bytearray(32 * MIB))] * 2) < 4 * MIB
    assert transient_bytes([reuse] * 3) < 4 * MIB


def test_calls_of_a_driver_are_counted(storage):
    # Of a pool that was never registered the driver is not asked.
    storage.register_mem_host_pool_v2(BytePool(), "kv")
    assert has_steps(storage)
    with counted(storage) as calls:
        storage.batch_exists_v2(["a", "b"])
        storage.batch_exists_v2(["a"])
    storage.batch_exists_v2(["a"])
    assert dict(calls) == {"objects_exist": 2}
    assert "objects_exist" not in vars(storage)


class Lister:
    """Looks through its directory in each set, and then writes."""

    def __init__(self, home):
        self.home = home

    def batch_set_v2(self):
        with os.scandir(self.home) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
        (self.home / f"page{len(names)}").touch()

    delete = clear = batch_set_v2


def test_the_steps_of_a_set_do_not_grow_with_what_lies_beside_it(tmp_path):
    store, counts = Lister(tmp_path), []
    steps = CallSteps(store, lambda: None)
    steps.at = 0
    for files in (0, 100):
        for number in range(files):
            (tmp_path / f"other{number}").touch()
        store.batch_set_v2()
        counts.append(steps.count)
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize(
    ("taken", "exponent", "seconds"),
    [
        *(
            (
                {size: (size / 1000) ** growth for size in (1000, 2000, 4000, 8000, 16000)},
                max(1.0, growth),
                16**growth * (250_000 / 16_000) ** max(1.0, growth),
            )
            for growth in (0.5, 1.0, 1.5, 2.0)
        ),
        # Of the last two calls alone the forecast would be 917 s; the driver is linear.
        ({8000: 1.3, 16000: 2.6, 32000: 5.2, 64000: 10.4}, 1.0, 40.6),
        # Times that do not grow with the number of keys are the machine's.
        ({2000: 0.004, 4000: 0.19, 8000: 0.11, 16000: 0.4}, 1.0, None),
    ],
)
def test_a_large_call_is_forecast_from_the_growth_of_smaller_ones(taken, exponent, seconds):
    seconds_for_all, fitted = forecast(taken)
    assert fitted == pytest.approx(exponent)
    assert seconds is None or seconds_for_all == pytest.approx(seconds, rel=0.01)


def test_one_call_that_was_disturbed_is_no_growth():
    assert forecast({8000: 1.3, 16000: 2.6, 32000: 2.6, 64000: 10.4})[0] < 80
