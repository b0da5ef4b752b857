"""A radix cache on each of several ranks: the same requests everywhere, with storages that lose,
fail and hang by themselves."""

from __future__ import annotations

import random
import threading
from dataclasses import astuple
from unittest import mock

from hicache_storage import create_storage
from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.storage_io.workers import Job
from tests.hybrid.radix.controller import WorldController
from tests.hybrid.radix.world import World
from tests.hybrid.rank import Rank
from tests.hybrid.stack import PAGE, hashes, identity, tokens
from tests.support.waiting import eventually

GRID = 2 * PAGE
TURNS = 4
"""Checkpoints of a whole conversation."""
ALL = 10**6


class Weather:
    """What the calls of one rank's storage meet: nothing, or now and then a failure, a loss, or a
    call that hangs."""

    def __init__(self, seed, objects):
        self.random, self.objects = random.Random(seed), objects
        self._changed = threading.Condition()
        self.bad, self.hanging = False, 0

    def turn(self, *, bad):
        with self._changed:
            self.bad = bad
            self._changed.notify_all()

    def lose(self, share):
        for name in sorted(self.objects):
            if self.random.random() < share:
                self.objects.pop(name, None)

    def __call__(self, operation):
        with self._changed:
            chance = (
                self.random.random()
                if self.bad and operation in ("exist", "read", "write")
                else 1.0
            )
            if chance < 0.1:
                raise OSError("the storage is down")
            if chance < 0.2:
                self.lose(0.05)
            if chance > 0.95 and self.bad:
                self.hanging += 1
                assert self._changed.wait_for(lambda: not self.bad, 60)
                self.hanging -= 1


class CacheRank(Rank):
    """Requests of three conversations; every rank holds bytes of its own for their tokens."""

    def serving(self):
        """Attention KV and states, which every rank has a share of, and a store of its own."""
        self._begin(GRID, f"rank {self.parallel.rank}")
        self.weather = Weather(
            f"{self.settings['seed']}/{self.parallel.rank}", self.world.controller.objects
        )
        self.world.controller.before = self.weather
        self.world.controller.attach()
        with (
            mock.patch.object(
                Job, "overdue", lambda job, seconds: not job.query() and self.weather.hanging > 0
            ),
            mock.patch("hicache_storage.hybrid.storage_io.backups.RETRY_SECONDS", 0.01),
        ):
            common = random.Random(self.settings["seed"])
            for number in range(self.settings["steps"]):
                self._step(common, number)
            self.weather.turn(bad=False)
            self._end()

    def sparse(self):
        """MLA and an indexer, the same bytes on all TP ranks of a CP shard, in one store: every
        page is a hit on every rank."""
        self.stack.close()
        self.stack = self.make_stack(states=0)
        self.controller = self.stack.controller
        self._begin(None, f"cp {self.parallel.cp_rank} pp {self.parallel.pp_rank}")
        storage = create_storage(
            "file",
            identity(self.parallel, kv_replicated=True),
            {"path": self.settings["path"] + "-sparse"},
        )
        self.controller.attach(storage)
        lengths = (3, 8, 5)
        for chain, pages in enumerate(lengths):
            self._serve(chain, pages)
        self.world.settle()
        self.own = {name: stats.pages_written for name, stats in storage.get_stats().pools.items()}
        for chain, pages in enumerate(lengths):
            self._forget()
            self.tell("fetched", self._fetch(chain, pages))
            self._serve(chain, pages)
        self._end()

    # One step
    # ----------------------------------------------------------------------------------------------------

    def _step(self, common, number):
        chain, pages = common.randrange(3), 2 * common.randint(1, TURNS)
        steps = (
            [self._serve] * 5
            + [self._visit_again] * 2
            + [self._stop_early, self._squeeze, self._lose, self._turn, self._attach_again]
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

    def _visit_again(self, chain, pages, common):
        """All memory was needed for others; what the ranks' stores have in common comes back."""
        for end in range(2, pages + 1, 2):
            self._serve(chain, end)
            self.world.settle()
        self._forget()
        self.weather.lose(0.02)
        # The weather's random calls would meet this question, too.
        keys = hashes(pages, chain)
        common_ends = [] if self.weather.bad else self.world.controller.restorable(keys)
        self.own[len(self.told)] = list(common_ends)
        self.tell("fetched", self.weather.bad, len(self.told), self._fetch(chain, pages))
        self._serve(chain, pages)

    def _stop_early(self, chain, pages, common):
        """A prefetch that is ended after some steps, wherever it is then."""
        self.cache.prefetch_from_storage("early", tokens(pages, chain))
        for _ in range(common.randrange(4)):
            self.cache.poll()
        self.tell("stopped", self.cache.end_prefetch("early"))

    def _squeeze(self, chain, pages, common):
        for evict in (self.cache.evict, self.cache.evict_host):
            evicted = evict(common.randrange(40), common.randrange(4))
            self.tell("evicted", *astuple(evicted))

    def _lose(self, chain, pages, common):
        self.weather.lose(0.02)

    def _turn(self, chain, pages, common):
        self.weather.turn(bad=common.random() < 0.6)

    def _attach_again(self, chain, pages, common):
        self.cache.end_prefetches()
        self.weather.turn(bad=False)
        self.controller.detach()
        self.world.controller.attach()
        self.cache.storage_changed()

    # Parts of steps
    # ----------------------------------------------------------------------------------------------

    def _begin(self, grid, label):
        policy = WritePolicy(self.settings.get("policy", "write_through"))
        self.world = World(WorldController(self.stack), PAGE, grid, policy, label)
        self.cache = self.world.cache

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
        self.tell("loaded", self.controller.stats().tokens_loaded)
        self.tell(*astuple(self.cache.usage()))
        assert self.cache.usage().device_tokens == self.cache.usage().host_tokens == 0
        eventually(lambda: self.stack.free() == self.stack.total())
        assert all(
            pool.available_size() == pool.size
            for pool in (self.world.kv_slots, self.world.state_slots)
            if pool
        )
