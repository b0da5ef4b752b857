"""Counters of a bridge, and placeholders of pages without bytes."""

from __future__ import annotations

import pytest

from hicache_storage.engines.bridge_metrics import (
    MAX_REASONS,
    BandwidthMeter,
    BatchSample,
    RefusedCalls,
)
from hicache_storage.engines.engine_pool import EnginePool
from hicache_storage.spec import HostPool, InvalidTransferError, PoolName


class TestRefusals:
    def test_each_is_counted_and_each_reason_logged_once(self, caplog):
        refusals = RefusedCalls("SGLang")
        for _ in range(3):
            refusals.note("batch_get_v1", "kv", InvalidTransferError("too short"))
        refusals.note("batch_get_v1", "mamba", InvalidTransferError("too short"))
        assert refusals.count == 4
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert errors == [
            (
                "hicache bridge for SGLang: refused batch_get_v1, pool kv: InvalidTransferError: too "
                "short"
            ),
            (
                "hicache bridge for SGLang: refused batch_get_v1, pool mamba: InvalidTransferError: "
                "too short"
            ),
        ]

    def test_reasons_are_not_remembered_without_bound(self, caplog):
        refusals = RefusedCalls("SGLang")
        for number in range(MAX_REASONS + 10):
            refusals.note("batch_exists", "", InvalidTransferError(str(number)))
        assert refusals.count == MAX_REASONS + 10
        assert (
            len([record for record in caplog.records if record.levelname == "ERROR"]) == MAX_REASONS
        )


class TestMeter:
    def move(self, kit, meter, storage, pool, keys, *, writes):
        transfer = pool.transfer("kv", keys, range(len(keys)))
        with meter.measured(storage, writes=writes):
            (storage.batch_set_v2 if writes else storage.batch_get_v2)([transfer])

    def test_batches_are_drained(self, kit):
        storage, pool = kit.memory_storage()
        meter = BandwidthMeter(enabled=True)
        self.move(kit, meter, storage, pool, ["a", "b"], writes=True)
        self.move(kit, meter, storage, pool, ["a", "b", "c"], writes=True)
        self.move(kit, meter, storage, pool, ["a", "x"], writes=False)
        # Of pages that moved nothing.
        self.move(kit, meter, storage, pool, ["x"], writes=False)
        written, read = meter.drain(writes=True), meter.drain(writes=False)
        assert [(batch.pages, batch.bytes) for batch in written] == [(2, 128), (1, 64)]
        assert [(batch.pages, batch.bytes) for batch in read] == [(1, 64)]
        assert meter.drain(writes=True) == meter.drain(writes=False) == []

    def test_it_can_be_switched_off(self, kit):
        storage, pool = kit.memory_storage()
        meter = BandwidthMeter(enabled=False)
        self.move(kit, meter, storage, pool, ["a"], writes=True)
        assert meter.drain(writes=True) == []

    @pytest.mark.parametrize(
        ("batch", "speed"),
        [(BatchSample(1, 2_000_000_000, 0.5), 4.0), (BatchSample(1, 1, 0.0), 0.0)],
    )
    def test_speed(self, batch, speed):
        assert batch.gigabytes_per_second == speed


class TestPlaceholders:
    def test_a_placeholder_pool_is_a_host_pool_that_any_driver_serves(self, kit):
        placeholders = EnginePool(
            memoryview(bytearray(8)), stride=1, page_bytes=1, layout="page_first", page_size=4
        )
        assert placeholders.geometry.size == 32
        assert isinstance(placeholders, HostPool)
        storage, _ = kit.memory_storage({PoolName.KV: placeholders})
        transfer = kit.pool(page_size=4).transfer("kv", ["a", "b"], [0, 7])
        assert storage.batch_set_v2([transfer]) == {"kv": [True, True]}
        assert storage.batch_exists_v2(["a", "b", "c"]).kv_hit_pages == 2
