"""Secondary tiers of vLLM, written as a reader of vLLM's interface would: a right one, and wrong ones."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import xxhash
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager


class SampleTier(SecondaryTierManager):
    """A file for each chunk: its checksum, and the bytes of its row."""

    def __init__(
        self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None, *, path
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        identity = self.identity(offloading_spec.config)
        self._home = Path(path, hashlib.sha256(identity).hexdigest())
        self._home.mkdir(parents=True, exist_ok=True)
        self._rows = primary_kv_view
        self._row = primary_kv_view.strides[0]
        self._finished = []

    def identity(self, config):
        """All that vLLM tells of the engine's pages."""
        return repr(
            (
                config.model,
                config.groups,
                config.cache,
                config.kv_cache_layout,
                config.replicated_layout,
                self.sizes(config.parallel),
            )
        ).encode()

    def sizes(self, parallel):
        """The numbers of workers."""
        return parallel.tp_size, parallel.pp_size, parallel.pcp_size

    def lookup(self, key, req_context):
        """Look at once."""
        return LookupResult.HIT if self._file(key).exists() else LookupResult.MISS

    def submit_store(self, job_metadata):
        """Store at once."""
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            if not self._file(key).exists():
                row = self._bytes(chunk).tobytes()
                part = self._file(key).with_suffix(f".{os.getpid()}-{id(self)}")
                part.write_bytes(self.seal(key, row) + row)
                part.replace(self._file(key))
        self.finish(JobResult(job_metadata.job_id, success=True))

    def submit_load(self, job_metadata):
        """Load at once; a chunk that is not what was stored is removed."""
        loaded = []
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            try:
                content = self._file(key).read_bytes()
            except FileNotFoundError:
                continue
            seal, row = content[:8], content[8:]
            if len(row) == self._row and self.is_sound(seal, key, row):
                self._bytes(chunk)[:] = row
                loaded.append(key)
            else:
                self.forget(key)
        success = len(loaded) == len(job_metadata.keys)
        self.finish(JobResult(job_metadata.job_id, success=success, successful_keys=loaded))

    def seal(self, key, row):
        """The checksum of a row, its key and its engine: whole files may change places."""
        return xxhash.xxh3_64_digest(self._home.name.encode() + key + row)

    def is_sound(self, seal, key, row):
        """Whether a row is the one that was sealed."""
        return seal == self.seal(key, row)

    def forget(self, key):
        """Remove a chunk that cannot be loaded."""
        self._file(key).unlink(missing_ok=True)

    def finish(self, result):
        """Report a job at the next occasion."""
        self._finished.append(result)

    def get_finished_jobs(self):
        """Each job once."""
        finished, self._finished = self._finished, []
        return finished

    def on_new_request(self, req_context):
        """No wishes."""
        return RequestOffloadingContext()

    def drain_jobs(self):
        """Nothing is under way."""

    def shutdown(self):
        """Let go of vLLM's memory."""
        self._rows = None

    def _file(self, key):
        return self._home / key.hex()

    def _bytes(self, chunk):
        start = int(chunk) * self._row
        return self._rows.cast("B")[start : start + self._row]


class DeliversDamage(SampleTier):
    """Verifies no checksum."""

    def is_sound(self, seal, key, row):
        return True


class TrustsTheFlag(SampleTier):
    """Leaves the numbers of workers out of the identity where vLLM says that they do not matter."""

    def sizes(self, parallel):
        return () if parallel.is_parallelism_agnostic else super().sizes(parallel)


class NeverReports(SampleTier):
    """Says nothing of a load that has failed."""

    def finish(self, result):
        if result.success:
            super().finish(result)


class KeepsTheUnreadable(SampleTier):
    """Goes on answering HIT for a chunk that it cannot load."""

    def forget(self, key):
        pass


class ReportsTwice(SampleTier):
    """Reports each store twice."""

    def finish(self, result):
        self._finished += [result] if result.successful_keys is not None else [result, result]


class BlocksTheScheduler(SampleTier):
    """Stores in the scheduler's thread, from a store that hangs."""

    def submit_store(self, job_metadata):
        time.sleep(3600)
