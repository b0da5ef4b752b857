"""One of two ranks that build a stack, run by `test_stack`: `python -m tests.hybrid.stack_rank RANK
FOLDER`."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace

import torch.distributed as dist

from hicache_storage.hybrid import ParallelConfig, RankGroupError, StorageConfig, TorchRankGroup
from hicache_storage.spec import HiCacheError
from tests.hybrid.stacks import Session, build, mamba_config


def main():
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    storage = StorageConfig(driver="file", model="m", options={"path": f"{folder}/store"})
    config = mamba_config(parallel=ParallelConfig.of_rank(rank, tp_size=2), storage=storage)
    refusals = (
        # One rank has been told that it is the other, or one of four.
        lambda: TorchRankGroup.of(ParallelConfig.of_rank(0, tp_size=2)),
        lambda: TorchRankGroup.of(ParallelConfig.of_rank(rank, tp_size=4 if rank else 2)),
        lambda: TorchRankGroup.of(
            ParallelConfig.of_rank(rank, **{"pp_size" if rank else "tp_size": 2})
        ),
        lambda: build(replace(config, device_tokens=config.device_tokens * (1 + rank))),
        lambda: build(replace(config, storage=replace(storage, driver="none")) if rank else config),
    )
    told = {"refused": [refused(ask) for ask in refusals]}
    with build(config) as stack:
        session = Session(stack, seed=rank)
        # Ranks hold other bytes of the same tokens.
        session.tokens = list(range(Session.LENGTH))
        session.insert()
        assert stack.drain(60)
        stack.cache.reset()
        session.fetch()
        told["restored"] = session.restore()
        assert stack.drain(60)
    try:
        stack._rank_group.all_reduce_min([1])
    except RankGroupError as error:
        told["closed"] = str(error)
    dist.destroy_process_group()
    told["threads"] = sorted(thread.name for thread in threading.enumerate())
    print(json.dumps(told))


def refused(ask):
    """What a rank is told when it, or the other one, is refused."""
    try:
        ask()
    except HiCacheError as error:
        return type(error).__name__
    return None


if __name__ == "__main__":
    main()
