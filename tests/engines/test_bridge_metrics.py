"""Counters of a bridge."""

from __future__ import annotations

import pytest

from hicache_storage.engines.bridge_metrics import (
    MAX_REASONS,
    BandwidthMeter,
    BatchSample,
    RefusedCalls,
)
from hicache_storage.spec import InvalidTransferError


class TestRefusals:
    def test_each_is_counted_and_each_reason_logged_once(self, caplog):
        refusals = RefusedCalls("SGLang")
        for _ in range(3):
            refusals.note("batch_get_v1", "kv", InvalidTransferError("too short"))
        refusals.note("batch_get_v1", "mamba", InvalidTransferError("too short"))
        assert refusals.count == 4
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        refused = "hicache bridge for SGLang: refused batch_get_v1"
        assert errors == [
            f"{refused}, pool kv: InvalidTransferError: too short",
            f"{refused}, pool mamba: InvalidTransferError: too short",
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
