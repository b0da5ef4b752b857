"""A radix cache on each of several ranks: the same requests everywhere, with storages that lose,
fail and hang by themselves."""

from __future__ import annotations

import random
import threading
from dataclasses import astuple
from unittest import mock

import torch

from hicache_storage import create_storage
from hicache_storage.hybrid import HybridIndices, page_hashes
from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.radix import HiMambaRadixCache, RadixCacheConfig
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import PoolHitPolicy, PoolTransfer
from hicache_storage.testing import MemoryStorage
from tests.hybrid.rank import Rank
from tests.hybrid.stack import INDEXER, KV, MAMBA, PAGE, identity, tokens
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
    """Requests of three conversations; `label` says which bytes a page has on this rank."""

    def serving(self):
        """Attention KV and states, which every rank has a share of, and a store of its own."""
        self.label = f"rank {self.parallel.rank}"
        objects = {}
        self.weather = Weather(f"{self.settings['seed']}/{self.parallel.rank}", objects)
        self._begin(GRID)
        self._attach(MemoryStorage(identity(self.parallel), objects))
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
        self.label = f"cp {self.parallel.cp_rank} pp {self.parallel.pp_rank}"
        self._begin(None)
        storage = create_storage(
            "file",
            identity(self.parallel, kv_replicated=True),
            {"path": self.settings["path"] + "-sparse"},
        )
        self.controller.attach(storage)
        lengths = (3, 8, 5)
        for chain, pages in enumerate(lengths):
            self._serve(chain, pages)
        self._settle()
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
        self.tell(*astuple(self.cache.usage()))

    def _serve(self, chain, pages, common=None):
        """A request that uses what is cached, and computes and inserts the rest."""
        prompt, labels = tokens(pages, chain), self._labels(chain)
        match = self.cache.match(prompt)
        lock = self.cache.lock(match)
        loaded = self.cache.load(lock) if match.needs_load else None
        if match.needs_load and loaded is None:
            self.cache.unlock(lock)
            match = self.cache.match(prompt, device_only=True)
            lock = self.cache.lock(match)
        self.controller.layer_counter(self.cache.start_loading()).synchronize()
        self.tell("match", match.length, match.host_length, loaded is not None)
        rows = loaded.device_indices if loaded else match.device_indices
        assert self.stack.holds("device", HybridIndices(rows), labels), "a hit with other bytes"
        self._check_state(
            loaded.state_slot if loaded else match.state_slot, labels[: match.length // PAGE]
        )
        if loaded and loaded.state_slot is not None:
            self.states.free(torch.tensor([loaded.state_slot]))
        new = (
            self.cache.alloc_kv(len(prompt) - match.length)
            if match.length < len(prompt)
            else rows[:0]
        )
        if new is not None:
            self._insert(prompt, rows, new, labels)
        self.cache.unlock(lock)

    def _insert(self, prompt, rows, new, labels):
        state = self.cache.alloc_state() if self.states else None
        # The test writes with its own thread, not with kernels.
        self.stack.compute.synchronize()
        self.stack.fill("device", HybridIndices(new), labels[rows.numel() // PAGE :])
        if state is not None:
            self.stack.fill(
                "device",
                HybridIndices(new[:0], {MAMBA: state}, {MAMBA: (0,)}),
                [],
                labels[: len(prompt) // PAGE],
            )
        result = self.cache.insert(
            prompt, torch.cat([rows, new]), {} if state is None else {len(prompt): int(state)}
        )
        self.tell("inserted", result.length, result.new_states)

    def _check_state(self, slot, labels):
        if slot is not None and labels:
            state = HybridIndices(
                torch.empty(0, dtype=torch.int64), {MAMBA: torch.tensor([slot])}, {MAMBA: (0,)}
            )
            assert self.stack.holds("device", state, [], labels), "another state"

    def _visit_again(self, chain, pages, common):
        """All memory was needed for others; what the ranks' stores have in common comes back."""
        for end in range(2, pages + 1, 2):
            self._serve(chain, end)
            self._settle()
        self._forget()
        self.weather.lose(0.02)
        # The weather's random calls would meet this question, too.
        self.own[len(self.told)] = [] if self.weather.bad else self._restorable(chain, pages)
        self.tell("fetched", self.weather.bad, len(self.told), self._fetch(chain, pages))
        self._serve(chain, pages)

    def _stop_early(self, chain, pages, common):
        """A prefetch that is ended after some steps, wherever it is then."""
        self.cache.prefetch_from_storage("early", tokens(pages, chain))
        for _ in range(common.randrange(4)):
            self.cache.poll()
        self.tell("stopped", self.cache.end_prefetch("early"))

    def _squeeze(self, chain, pages, common):
        evicted = self.cache.evict(common.randrange(40), common.randrange(4))
        self.tell(
            "evicted",
            *astuple(evicted),
            *astuple(self.cache.evict_host(common.randrange(40), common.randrange(4))),
        )

    def _lose(self, chain, pages, common):
        self.weather.lose(0.02)

    def _turn(self, chain, pages, common):
        self.weather.turn(bad=common.random() < 0.6)

    def _attach_again(self, chain, pages, common):
        self.cache.end_prefetches()
        self.weather.turn(bad=False)
        self.controller.detach()
        self._attach(MemoryStorage(identity(self.parallel), self.weather.objects))
        self.cache.storage_changed()

    # Parts of steps
    # ----------------------------------------------------------------------------------------------

    def _begin(self, grid):
        entries = self.stack.group.entries
        self.states = entries[MAMBA].device_pool if grid else None
        config = RadixCacheConfig(
            page_size=PAGE,
            checkpoint_grid=grid,
            write_policy=WritePolicy(self.settings.get("policy", "write_through")),
        )
        self.cache = HiMambaRadixCache(
            config, self.controller, entries[KV].device_pool, self.states
        )

    def _attach(self, storage):
        self.storage, storage.before = storage, self.weather
        self.controller.attach(storage)

    def _labels(self, chain):
        return [f"{key}/{self.label}" for key in page_hashes(tokens(2 * TURNS, chain), PAGE)]

    def _restorable(self, chain, pages):
        keys = page_hashes(tokens(pages, chain), PAGE)
        side = [
            PoolTransfer(MAMBA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(INDEXER, keys=keys),
        ]
        return list(self.storage.batch_exists_v2(keys, side).restorable_prefix_pages)

    def _fetch(self, chain, pages):
        """Tokens that a prefetch brought."""
        before = self.cache.match(tokens(pages, chain)).length
        if self.cache.prefetch_from_storage("fetch", tokens(pages, chain)):
            eventually(lambda: self.cache.poll() or self.cache.check_prefetch("fetch"))
        return self.cache.match(tokens(pages, chain)).length - before

    def _settle(self):
        eventually(lambda: self.cache.poll() or self.cache.idle())

    def _forget(self):
        self._settle()
        self.cache.evict(ALL, ALL)
        self._settle()
        self.cache.evict_host(ALL, ALL)

    def _end(self):
        """All is given back on every rank."""
        self._forget()
        self.tell(*astuple(self.cache.usage()))
        assert self.cache.usage().device_tokens == self.cache.usage().host_tokens == 0
        eventually(lambda: self.stack.free() == self.stack.total())
        for entry in self.stack.group.entries.values():
            assert (
                entry.device_pool is None
                or entry.device_pool.available_size() == entry.device_pool.size
            )
