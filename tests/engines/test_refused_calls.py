"""Refused calls of a bridge."""

from __future__ import annotations

from hicache_storage.engines.bridge_storage import MAX_REASONS, RefusedCalls
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
