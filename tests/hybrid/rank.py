"""Ranks, each a process, run by `test_ranks`: `python rank.py SCENARIOS FOLDER JSON`.

Ranks take the same decisions from `common`, and meet presence, faults and host pressure of their
own. What a rank was told is written to FOLDER/SCENARIO.RANK.json; the test compares.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hicache_storage import create_storage
from hicache_storage.hybrid import (
    HybridCacheController,
    ParallelConfig,
    PrefetchRules,
    RankGroupError,
    StorageConfig,
    TorchRankGroup,
)
from hicache_storage.spec import HiCacheError, PoolTransfer
from hicache_storage.testing import FaultLayer, FaultOptions, MemoryStorage
from tests.hybrid.stack import (
    MAMBA,
    PAGE,
    Session,
    Stack,
    build,
    hashes,
    identity,
    mamba_config,
)
from tests.support.waiting import eventually

SECONDS = 200
"""After which a rank that has not ended says what it does, and ends."""
WORLD_SECONDS = 120
PAGES = 8
FAULTS = {"failure": 0.15, "partial": 0.15, "delay": 0.2, "delay_seconds": 0.02, "hang": 0.05}
CALL_SECONDS = 0.1


class Counted:
    """Counts the collectives of a rank."""

    def __init__(self, rank_group):
        self.rank_group, self.size, self.count = rank_group, rank_group.size, 0

    def all_reduce_min(self, values):
        self.count += 1
        return self.rank_group.all_reduce_min(values)


def presence(seed, rank):
    """Which pages of KV, and states at which endpoints, a rank's store has."""
    drawn = random.Random(f"{seed}/{rank}")
    likely = drawn.choice([0.9, 1.0, 1.0, 1.0])
    kv = [drawn.random() < likely for _ in range(PAGES)]
    states = [drawn.random() < 0.8 for _ in range(PAGES)]
    return kv, states


def pressure(seed, rank):
    """Host pages and states that others use on a rank."""
    drawn = random.Random(f"{seed}/{rank}/pressure")
    return (drawn.randrange(17), drawn.randrange(5)) if drawn.random() < 0.2 else (0, 0)


class Rank:
    def __init__(self, settings, rank):
        sizes = {f"{axis}_size": settings.get(axis, 1) for axis in ("tp", "cp", "pp")}
        self.settings = settings
        self.parallel = ParallelConfig.of_rank(rank, **sizes)
        self.rank_group = Counted(TorchRankGroup.of(self.parallel, timeout_seconds=WORLD_SECONDS))
        self.told, self.own = [], {}
        self.stack = self.make_stack()
        self.controller = self.stack.controller

    def make_stack(self, **changes):
        return Stack(
            **{"states": 4, "parallel": self.parallel, "rank_group": self.rank_group, **changes}
        )

    def tell(self, *what):
        """What has to be the same on every rank; printed, so that a rank that hangs is known by the
        last of it."""
        self.told.append(what)
        print(*what, flush=True)

    def close(self):
        self.tell("collectives", self.rank_group.count)
        self.stack.close()
        assert not self.stack.simulator.races

    # Scenarios
    # ---------------------------------------------------------------------------------------------------

    def chances(self):
        """Random presence on every rank; faults, host pressure and early ends in some of the
        rounds."""
        rules = PrefetchRules(threshold_tokens=PAGE, policy="wait_complete", occupancy=1.0)
        impatient = HybridCacheController(
            self.stack.group,
            self.stack.transfers,
            parallel=self.parallel,
            rank_group=self.rank_group,
            rules=rules,
            storage_call_seconds=CALL_SECONDS,
            stop_seconds=CALL_SECONDS,
        )
        for number in range(self.settings["rounds"]):
            seed = f"{self.settings['seed']}/{number}"
            common = random.Random(seed)
            faulty, early = common.random() < 0.6, common.random() < 0.2
            keys, storage = self.filled(seed, *presence(seed, self.parallel.rank))
            if faulty:
                storage = FaultLayer(
                    storage, FaultOptions(seed=self.parallel.rank * 1000 + number, **FAULTS)
                )
            others = self.stack.take(
                "host",
                pressure(seed, self.parallel.rank)[0],
                range(pressure(seed, self.parallel.rank)[1]),
            )
            self.controller = impatient if faulty else self.stack.controller
            self.controller.attach(storage)
            result = self.fetched(seed, keys, polls=common.randrange(6) if early else None)
            self.stack.give("host", others)
            self.tell(
                "round",
                number,
                faulty,
                early,
                result.tokens // PAGE,
            )
            written = self.written(keys, common)
            stored = self.stored(keys, result)
            self.tell("written", written, "stored", stored)
            if faulty:
                storage.disable()
            self.controller.detach()
            eventually(lambda: self.stack.free() == self.stack.total())

    def shards(self):
        """MLA under CP, in a shared store: each CP shard is written once and hit by every rank."""
        own = identity(self.parallel, kv_replicated=True)
        storage = create_storage("file", own, {"path": self.settings["path"]})
        keys = hashes(PAGES)
        # Every CP rank holds other bytes under the same keys.
        labels = [f"{key}/{self.parallel.cp_rank}/{self.parallel.pp_rank}" for key in keys]
        self.controller.attach(storage)
        host = self.stack.take("host", PAGES, ends=(4, 8))
        self.stack.fill("host", host, labels)
        self.controller.backups.begin(host, keys)
        [stored] = eventually(self.controller.backups.completed)
        self.stack.give("host", host)
        written = {name: stats.pages_written for name, stats in storage.get_stats().pools.items()}
        self.tell("stored", stored.stored_pages, stored.complete)
        result = self.fetched(0, keys, labels=labels)
        self.tell("restored", result.tokens // PAGE)
        self.own = written
        self.controller.detach()

    def lost(self):
        """A rank that goes leaves the others with an error, not waiting."""
        _, storage = self.filled(0, [True] * PAGES, [True] * PAGES)
        self.controller.attach(storage)
        operation = self.controller.prefetcher.begin("r", hashes(PAGES))
        if self.parallel.rank == 0:
            os._exit(0)
        for _ in range(2):
            try:
                eventually(operation.poll)
            except RankGroupError:
                self.tell("lost")
        self.controller.detach()

    def building(self):
        """A fault of one rank is a refusal for both; then both build a stack that serves."""
        rank, mine = self.parallel.rank, self.parallel
        store = StorageConfig(driver="file", model="m", options={"path": self.settings["path"]})
        config = mamba_config(parallel=mine, storage=store)
        refusals = (
            # One rank has been told that it is the other, or one of four.
            lambda: TorchRankGroup.of(ParallelConfig.of_rank(0, pp_size=2)),
            lambda: TorchRankGroup.of(ParallelConfig.of_rank(rank, pp_size=4 if rank else 2)),
            lambda: TorchRankGroup.of(
                ParallelConfig.of_rank(rank, **{"tp_size" if rank else "pp_size": 2})
            ),
            lambda: build(replace(config, device_tokens=config.device_tokens * (1 + rank))),
            lambda: build(
                replace(config, storage=replace(store, driver="none")) if rank else config
            ),
        )
        self.own = [refused(ask) for ask in refusals]
        with build(config) as stack:
            session = Session(stack, seed=rank)
            # Ranks hold other bytes of the same tokens.
            session.tokens = list(range(Session.LENGTH))
            session.insert()
            assert stack.drain(60)
            stack.cache.reset()
            session.fetch()
            self.tell("restored", *session.restore())
            assert stack.drain(60)
        try:
            stack.controller.rank_group.all_reduce_min([1])
        except RankGroupError as error:
            self.tell("closed", str(error))
        eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("hicache")])

    # Steps
    # -------------------------------------------------------------------------------------------------------

    def filled(self, seed, kv, states):
        """A store of this rank with some pages of a chain."""
        keys = hashes(PAGES, seed)
        storage = MemoryStorage(identity(self.parallel))
        for name, entry in self.stack.group.entries.items():
            storage.register_mem_host_pool_v2(entry.host_pool, name)
        with_states = tuple(end for end, there in enumerate(states, start=1) if there)
        for end in range(1, PAGES + 1):
            ends = (1,) if end in with_states else ()
            host = self.stack.take("host", 1, ends)
            self.stack.fill("host", host, keys[end - 1 : end])
            present = [
                name
                for name in self.stack.group.entries
                if (kv[end - 1] if name != MAMBA else bool(ends))
            ]
            transfers = [
                PoolTransfer(name, self.stack.group.slots(host, name), keys=[keys[end - 1]])
                for name in present
            ]
            assert all(all(pages) for pages in storage.batch_set_v2(transfers).values())
            self.stack.give("host", host)
        fresh = MemoryStorage(identity(self.parallel), storage.objects)
        storage.close()
        return keys, fresh

    def fetched(self, seed, keys, polls=None, labels=None):
        """Prefetch a chain, to its end or for so many polls; what came is what belongs to the
        labels, by default the keys."""
        operation = self.controller.prefetcher.begin("r", hashes(PAGES, seed))
        if polls is None:
            eventually(lambda: operation.poll() and operation.done)
        else:
            for _ in range(polls):
                operation.poll()
        result = self.controller.prefetcher.terminate(operation)
        assert self.stack.holds("host", result, labels or keys)
        return result

    def written(self, keys, common):
        """Write-backs and loads, told in the same order everywhere."""
        told = []
        for node in range(common.randrange(3)):
            device = self.stack.take("device", common.randint(1, 6), (1,))
            host = self.controller.write(device, node)
            told.append(host is not None)
            self.controller.start_writing()
            if host is not None:
                told += eventually(self.controller.completed_writes)
                self.stack.give("host", host)
            self.stack.give("device", device)
        return told

    def stored(self, keys, result):
        """What was fetched is backed up again; a rank whose storage fails decides for all."""
        number = self.controller.backups.begin(result, keys[: result.tokens // PAGE])
        self.stack.give("host", result)
        [told] = eventually(self.controller.backups.completed)
        assert told.operation_id == number
        return told.stored_pages, told.complete


def refused(ask):
    """What a rank is told when it, or the other one, is refused."""
    try:
        ask()
    except HiCacheError as error:
        return type(error).__name__
    return None


def main(kinds):
    """Run scenarios one after the other, each on a rank of one of these kinds.

    Ranks are forks of this process, which has imported everything; each writes to a log of its own.
    """
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    settings = json.loads(sys.argv[3])
    world = settings.get("tp", 1) * settings.get("cp", 1) * settings.get("pp", 1)
    for rank in range(world):
        if not os.fork():
            with (folder / f"{rank}.log").open("w") as log:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
            play(kinds, names, rank, world, folder, settings)
            return
    statuses = [os.wait()[1] for _ in range(world)]
    sys.exit(any(statuses))


def play(kinds, names, rank, world, folder, settings):
    """Be a rank."""
    # One that hangs says where, in all of its threads.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=WORLD_SECONDS),
    )
    for name in names:
        print("scenario", name, flush=True)
        place = next(kind for kind in kinds if hasattr(kind, name))(settings, rank)
        getattr(place, name)()
        place.close()
        (folder / f"{name}.{rank}.json").write_text(
            json.dumps({"told": place.told, "own": place.own})
        )


if __name__ == "__main__":
    from tests.hybrid.cache_rank import CacheRank

    main([Rank, CacheRank])
