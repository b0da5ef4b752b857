"""The controller over pools of integers, as `World` uses and disturbs it."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from random import Random

import torch

from hicache_storage.spec import PoolHitPolicy, PoolTransfer
from hicache_storage.testing import MemoryStorage
from tests.hybrid.stack import INDEXER, KV, MAMBA, RULES, Stack, identity


class Rows:
    """Slots of pools as integers: every layer and part of a slot holds its number, shifted by which
    part it is."""

    def __init__(self, *pools):
        self._page_size = pools[0].page_size
        self._parts = [
            tensor[(..., *[0] * (tensor.dim() - 2))]
            if tensor.dtype == torch.int64
            else tensor.flatten(1).view(torch.int64)
            for pool in pools
            for layer in range(pool.layer_num)
            for tensor in pool.layer(layer)
        ]
        """(pages, slots of a page) each."""

    def _places(self, slots):
        return torch.as_tensor(slots) // self._page_size, torch.as_tensor(slots) % self._page_size

    def __setitem__(self, slots, values):
        for shift, part in enumerate(self._parts):
            part[self._places(slots)] = values + shift

    def __getitem__(self, slots):
        found = [part[self._places(slots)] - shift for shift, part in enumerate(self._parts)]
        assert all(torch.equal(values, found[0]) for values in found), (
            "the layers of a slot are not of one token"
        )
        return found[0]


class Faults(logging.Handler):
    """Keeps what the SDK logs as an exception: faults of its own that it goes on after."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.seen = []
        logging.getLogger("hicache_storage.hybrid").addHandler(self)

    def emit(self, record):
        self.seen.append(self.format(record))

    def close(self):
        logging.getLogger("hicache_storage.hybrid").removeHandler(self)
        super().close()


class WorldController:
    """A controller and what is below it; passes calls on.

    With states: MHA, an indexer and Mamba. Without: MLA and an indexer.
    """

    def __init__(self, stack, seed=0):
        self.random, self._faults, self.stack = Random(seed), Faults(), stack
        self.controller, self.host = stack.controller, stack.host
        self.host_slots = stack.transfers.host_slots
        self.kv_slots, self.state_slots = stack.device[KV], stack.device.get(MAMBA)
        self.device_memory, self.host_memory = (
            {KV: Rows(pools[KV], pools[INDEXER])}
            | ({MAMBA: Rows(pools[MAMBA])} if MAMBA in pools else {})
            for pools in (stack.device, stack.host)
        )
        self.objects, self._loses, self._arriving = {}, 0.0, set()
        self.mood, self._mood_changed = "well", threading.Condition()
        self.hanging = 0
        """Calls of the storage that hang now."""

    @classmethod
    def of(cls, sizes, page_size, *, states, seed=0, **options):
        """Make one with a storage over pools of these sizes."""
        stack = Stack(
            pages=sizes["host_kv"] // page_size,
            states=sizes["host_states"] if states else 0,
            page_size=page_size,
            device=(sizes["device_kv"], sizes["device_states"]),
            seed=seed,
            prefetch=replace(RULES, threshold_tokens=0),
            **options,
        )
        made = cls(stack, seed)
        made.attach()
        return made

    def __getattr__(self, name):
        return getattr(self.controller, name)

    def close(self):
        self.stack.close()
        self._faults.close()
        assert not self.stack.simulator.races
        assert not self._faults.seen

    # -- the storage

    def attach(self, *, empty=False):
        if empty:
            self.objects = {}
        own = identity(self.controller.parallel, page_size=self.group.page_size)
        self.storage = MemoryStorage(own, self.objects)
        self.storage.before = self.before
        self.controller.attach(self.storage)

    def be(self, mood):
        """Let the storage be well, full, fail, hang until its mood changes, or be unsteady: fail,
        lose pages or hang now and then."""
        with self._mood_changed:
            self.mood = mood
            self._mood_changed.notify_all()

    def before(self, operation):
        with self._mood_changed:
            if self.mood == "fails" or (self.mood == "is full" and operation == "write"):
                raise OSError("no space left on device")
            unsteady = self.mood == "unsteady" and operation in ("exist", "read", "write")
            chance = self.random.random() if unsteady else 0.5
            if chance < 0.1:
                raise OSError("the storage is down")
            if chance < 0.2:
                self.lose(0.05, while_read=False)
            if self.mood == "hangs" or chance > 0.95:
                mood = self.mood
                self.hanging += 1
                assert self._mood_changed.wait_for(lambda: self.mood != mood, 60)
                self.hanging -= 1
        if operation == "read" and self._loses:
            share, self._loses = self._loses, 0.0
            self.lose(share, while_read=False)

    def lose(self, share, *, while_read):
        """Let the storage lose some of what it has: now, or when it is next read, after it said
        that it has it."""
        if while_read:
            self._loses = share
            return
        for name in sorted(self.objects):
            if self.random.random() < share:
                self.objects.pop(name, None)

    def restorable(self, keys):
        """Where a prefix of these pages can end, in pages, by what the storage has."""
        side = [PoolTransfer(INDEXER, keys=keys)]
        if self.state_slots:
            policy = PoolHitPolicy.TRAILING_PAGES
            side.append(PoolTransfer(MAMBA, keys=keys[-1:], hit_policy=policy))
        return self.storage.batch_exists_v2(keys, side).restorable_prefix_pages

    # -- what the engine does about copies

    def load(self, host, node_id):
        taken = self.controller.load(host, node_id)
        self._arriving |= set(taken.kv.tolist()) if taken else set()
        return taken

    def wait_for_loads(self, counter):
        counter.synchronize()
        self._arriving.clear()

    def before_overwrite(self, device):
        self.controller.before_overwrite(device)
        # The test writes with its own thread, not with kernels.
        self.stack.compute.synchronize()

    def arriving(self):
        """Device slots of KV whose load has not been waited for."""
        return self._arriving

    def prefetched_slots(self):
        """Host slots of prefetches that have not been handed over."""
        prefetcher = self.controller.prefetcher
        for operation in prefetcher._live:
            buffers = operation.buffers
            if operation.done and buffers:
                yield from self.group.owned(buffers.delivered(operation.delivered)).items()
            elif buffers:
                yield from buffers.all_slots().items()
