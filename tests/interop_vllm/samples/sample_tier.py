"""Secondary tiers of vLLM with one fault each: this project's own, and what the fault changes."""

from __future__ import annotations

import time

from vllm.v1.kv_offload.base import LookupResult

from hicache_storage.engines.vllm import HiCacheTier


class NeverReports(HiCacheTier):
    """Says nothing of a load that has failed."""

    def get_finished_jobs(self):
        return [result for result in super().get_finished_jobs() if result.success]


class KeepsTheUnreadable(HiCacheTier):
    """Goes on answering HIT for a chunk that it cannot load."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._found = set()

    def lookup(self, key, req_context):
        found = super().lookup(key, req_context)
        if found is LookupResult.HIT:
            self._found.add(key)
        return LookupResult.HIT if key in self._found else found


class ReportsTwice(HiCacheTier):
    """Reports each store twice."""

    def get_finished_jobs(self):
        results = super().get_finished_jobs()
        return results + [result for result in results if result.successful_keys is None]


class BlocksTheScheduler(HiCacheTier):
    """Stores in the scheduler's thread, from a store that hangs."""

    def submit_store(self, job_metadata):
        time.sleep(3600)
