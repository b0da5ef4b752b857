"""Ranks, each a process, run by `test_ranks`: `python -m tests.hybrid.rank SCENARIOS FOLDER JSON`.

Ranks take the same decisions from `common`, and each has a storage that loses, fails and hangs by
itself, and host memory that others use. What a rank was told is written to
FOLDER/SCENARIO.RANK.json; the test compares.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import threading
from dataclasses import astuple
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from hicache_storage.hybrid import ParallelConfig, RankGroupError, TorchRankGroup
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.plugins import create_storage
from hicache_storage.spec import HiCacheError
from hicache_storage.testing import MemoryStorage
from tests.hybrid.radix.controller import WorldController
from tests.hybrid.radix.world import World
from tests.hybrid.stack import PAGE, Session, Stack, build, hashes, identity, mamba_config, tokens
from tests.support.waiting import eventually

SECONDS = 200
"""After which a rank that has not ended says what it does, and ends."""
GRID = 2 * PAGE
TURNS = 4
"""Checkpoints of a whole conversation."""
ALL = 10**6


class Counted:
    """Counts the collectives of a rank."""

    def __init__(self, rank_group):
        self.rank_group, self.size, self.count = rank_group, rank_group.size, 0

    def all_reduce_min(self, values):
        self.count += 1
        return self.rank_group.all_reduce_min(values)


class Rank:
    """Requests of three conversations; every rank holds bytes of its own for their tokens."""

    stack = None

    def __init__(self, settings, rank):
        sizes = {f"{axis}_size": settings.get(axis, 1) for axis in ("tp", "cp", "pp")}
        self.settings = settings
        self.parallel = ParallelConfig.of_rank(rank, **sizes)
        self.rank_group = Counted(TorchRankGroup.of(self.parallel))
        self.told, self.own = [], {}
        self.label = f"rank {rank}"
        self.random = random.Random(self.label)

    def begin(self):
        """Make a cache over a stack."""
        self.stack = Stack(states=4, parallel=self.parallel, rank_group=self.rank_group)
        self.controller = self.stack.controller
        # The faults of a rank's storage are its own.
        self.storage = WorldController(self.stack, self.label)
        self.world = World(self.storage, PAGE, GRID, label=self.label)
        self.cache = self.world.cache

    def tell(self, *what):
        """What has to be the same on every rank; printed, so that a rank that hangs is known by the
        last of it."""
        self.told.append(what)
        print(*what, flush=True)

    def close(self):
        self.tell("collectives", self.rank_group.count)
        if self.stack:
            self.stack.close()
            assert not self.stack.simulator.races

    # Scenarios
    # ---------------------------------------------------------------------------------------------------

    def serving(self):
        """Attention KV and states, which every rank has a share of, and a store of its own."""
        self.begin()
        self.storage.attach()
        with (
            mock.patch.object(
                Job, "overdue", lambda job, seconds: not job.query() and self.storage.hanging > 0
            ),
            mock.patch("hicache_storage.hybrid.storage_io.backups.RETRY_SECONDS", 0.01),
        ):
            common = random.Random(self.settings["seed"])
            # Prefixes of each length come back at first: how much does once a storage is unsteady
            # depends on timing.
            for turns in range(1, TURNS + 1):
                self._visit_again(0, 2 * turns, common, lost=0.0)
            for number in range(self.settings["steps"]):
                self._step(common, number)
            self.storage.be("well")
            self._end()

    def lost(self):
        """A rank that goes leaves the others with an error, not waiting."""
        self.begin()
        self.controller.attach(MemoryStorage(identity(self.parallel)))
        operation = self.controller.prefetcher.begin("r", hashes(8))
        if self.parallel.rank == 0:
            os._exit(0)
        for _ in range(2):
            try:
                eventually(lambda: self.controller.prefetcher.advance() or operation.ready)
            except RankGroupError:
                self.tell("lost")
        self.controller.detach()

    def building(self):
        """A fault of one rank is a refusal for both; then both build a stack that serves."""
        rank, mine = self.parallel.rank, self.parallel
        config = mamba_config(parallel=mine)
        storage = create_storage("file", config.identity("m"), {"path": self.settings["path"]})
        refusals = (
            # One rank has been told that it is the other, or one of four.
            lambda: TorchRankGroup.of(ParallelConfig.of_rank(0, pp_size=2)),
            lambda: TorchRankGroup.of(ParallelConfig.of_rank(rank, pp_size=4 if rank else 2)),
            lambda: TorchRankGroup.of(
                ParallelConfig.of_rank(rank, **{"tp_size" if rank else "pp_size": 2})
            ),
        )
        self.own = [refused(ask) for ask in refusals]
        with build(config, storage) as stack:
            Session(stack, seed=rank).comes_back()
        try:
            stack.controller.rank_group.all_reduce_min([1])
        except RankGroupError as error:
            self.tell("closed", str(error))
        eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("hicache")])

    # One step
    # ----------------------------------------------------------------------------------------------------

    def _step(self, common, number):
        chain, pages = common.randrange(3), 2 * common.randint(1, TURNS)
        steps = (
            [self._serve] * 5
            + [self._visit_again] * 2
            + [self._turn] * 3
            + [self._stop_early, self._squeeze, self._press, self._lose, self._attach_again]
        )
        step = common.choice(steps)
        self.tell(number, step.__name__, chain, pages)
        step(chain, pages, common)
        self.cache.poll()
        self.world.check()
        self.tell(*astuple(self.cache.usage()))

    def _serve(self, chain, pages, common=None):
        """A request that uses what is cached, and computes and inserts the rest."""
        match = self.cache.match(tokens(pages, chain))
        self.tell("match", match.length, match.host_length)
        # The last token is computed, whatever is cached.
        self.world.visit((*tokens(pages, chain), 0))

    def _visit_again(self, chain, pages, common, lost=0.02):
        """All memory was needed for others; what the ranks' stores have in common, and all ranks
        have room for, comes back."""
        for end in range(2, pages + 1, 2):
            self._serve(chain, end)
            self.world.settle()
        self._forget()
        self.storage.lose(lost, while_read=False)
        # The random faults would meet this question, too.
        bad = self.storage.mood != "well"
        self.own[len(self.told)] = [] if bad else self.world.fetchable(tokens(pages, chain))
        self.tell("fetched", bad, len(self.told), self._fetch(chain, pages))
        self._serve(chain, pages)

    def _stop_early(self, chain, pages, common):
        """A prefetch that is ended after some steps, wherever it is then."""
        self.cache.prefetch_from_storage("early", tokens(pages, chain))
        for _ in range(common.randrange(4)):
            self.cache.poll()
        self.tell("stopped", self.cache.end_prefetch("early"))

    def _squeeze(self, chain, pages, common):
        for evict in (self.cache.evict, self.cache.evict_host):
            evict(common.randrange(40), common.randrange(4))

    def _press(self, chain, pages, common):
        """Others use memory of this rank's host, until the next time."""
        self.world.take_host(self.random.randrange(12), self.random.randrange(4))

    def _lose(self, chain, pages, common):
        self.storage.lose(0.02, while_read=False)

    def _turn(self, chain, pages, common):
        self.storage.be("unsteady" if common.random() < 0.6 else "well")

    def _attach_again(self, chain, pages, common):
        self.cache.end_prefetches()
        self.storage.be("well")
        self.controller.detach()
        self.storage.attach()
        self.cache.storage_changed()

    # Parts of steps
    # ----------------------------------------------------------------------------------------------

    def _fetch(self, chain, pages):
        """Tokens that a prefetch brought."""
        before = self.cache.match(tokens(pages, chain)).length
        if self.cache.prefetch_from_storage("fetch", tokens(pages, chain)):
            eventually(lambda: self.cache.poll() or self.cache.check_prefetch("fetch"))
        return self.cache.match(tokens(pages, chain)).length - before

    def _forget(self):
        self.world.settle()
        self.cache.evict(ALL, ALL)
        self.world.settle()
        self.cache.evict_host(ALL, ALL)

    def _end(self):
        """All is given back on every rank."""
        self._forget()
        self.world.take_host(0, 0)
        self.tell("loaded", self.controller.stats().tokens_loaded)
        self.tell(*astuple(self.cache.usage()))
        assert self.cache.usage().device_tokens == self.cache.usage().host_tokens == 0
        eventually(lambda: self.stack.free() == self.stack.total())
        assert all(
            pool.available_size() == pool.size
            for pool in (self.world.kv_slots, self.world.state_slots)
            if pool
        )


def refused(ask):
    """What a rank is told when it, or the other one, is refused."""
    try:
        ask()
    except HiCacheError as error:
        return type(error).__name__
    return None


def main():
    """Run scenarios one after the other.

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
            play(names, rank, world, folder, settings)
            return
    statuses = [os.wait()[1] for _ in range(world)]
    sys.exit(any(statuses))


def play(names, rank, world, folder, settings):
    """Be a rank."""
    # One that hangs says where, in all of its threads.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
    )
    for name in names:
        print("scenario", name, flush=True)
        place = Rank(settings, rank)
        getattr(place, name)()
        place.close()
        (folder / f"{name}.{rank}.json").write_text(
            json.dumps({"told": place.told, "own": place.own})
        )


if __name__ == "__main__":
    main()
