"""What matrix.md says about `vllm-fs`, shown with vLLM alone: `python vllm_fs.py [RULE]...`"""

import mmap
import tempfile
import time
import types
from pathlib import Path

import numpy as np
from shows import main, shows
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

ROW = 4096
KEY = make_offload_key(bytes(32), 0)


class Engine:
    """One replica: two rows of its CPU tier, and the fs tier on a directory."""

    def __init__(self, root, tp_size=1, layout="LBHNC"):
        self.rows = np.frombuffer(mmap.mmap(-1, 2 * ROW), np.int8).reshape(2, ROW)
        parallel = OffloadingParallelConfig(
            rank=0,
            world_size=tp_size,
            tp_size=tp_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            # As vLLM itself sets it for one group of full attention and the V1 model runner.
            is_parallelism_agnostic=True,
        )
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
            worker_kv_bytes_per_block=ROW // tp_size,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
            kv_cache_layout=layout,
        )
        spec = types.SimpleNamespace(
            config=config,
            blocks_per_chunk=1,
            replicated_layout=False,
            kv_events_config=OffloadingKVEventsConfig(False, False),
        )
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "fs", "root_dir": str(root)}, memoryview(self.rows), spec
        )
        self.jobs = 0

    def store(self, value):
        """Store row 0 full of a value; whether that was done."""
        self.rows[0] = value
        return self._done(self.tier.submit_store, 0)

    def load(self):
        """Load into row 1, as vLLM does after a hit; whether that was done."""
        self.rows[1] = 0
        return self._done(self.tier.submit_load, 1)

    def finds(self):
        """Whether a lookup is a hit."""
        request = ReqContext(f"request-{time.monotonic_ns()}")
        while (found := self.tier.lookup(KEY, request)) is LookupResult.RETRY:
            self.tier.on_schedule_end(ScheduleEndContext([], []))
            time.sleep(0.001)
        return found is LookupResult.HIT

    def _done(self, submit, row):
        self.jobs += 1
        request = ReqContext(f"job-{self.jobs}")
        chunks = np.array([row], np.int32)
        submit(TransferJob(self.jobs, [KEY], chunks, bool(row), request))
        while not (results := list(self.tier.get_finished_jobs())):
            time.sleep(0.001)
        return results[0].success


def make_root():
    """An empty directory."""
    return Path(tempfile.mkdtemp(prefix="reproduction-"))


@shows("GET-5", "GET-1")
def damaged_bytes_are_delivered(make):
    """A chunk of which one byte was changed on disk is loaded, with success."""
    root = make()
    assert Engine(root).store(7)
    [file] = root.rglob("*.bin")
    with file.open("r+b") as chunk:
        chunk.seek(ROW // 2)
        chunk.write(b"x")
    other = Engine(root)
    assert other.finds()
    assert other.load()
    assert (other.rows[1] != 7).sum() == 1


@shows("ID-1")
def tp_sizes_meet(make):
    """A chunk that was stored at TP 1 is a hit at TP 2, whose rows have another order."""
    root = make()
    assert Engine(root, tp_size=1).store(7)
    two = Engine(root, tp_size=2)
    assert two.finds()
    assert two.load()
    assert (two.rows[1] == 7).all()


@shows("ID-1")
def layouts_meet(make):
    """A chunk of the layout LBHNC is a hit in an engine whose blocks are BLHNC."""
    root = make()
    assert Engine(root).store(7)
    other = Engine(root, layout="BLHNC")
    assert other.finds()
    assert other.load()
    assert (other.rows[1] == 7).all()


if __name__ == "__main__":
    main(make_root)
