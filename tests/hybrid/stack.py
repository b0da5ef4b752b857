"""A small hybrid model's pools on the stream simulator, and a controller over them.

KV in pages of 4 tokens, an indexer that uses KV's slots, and Mamba states. Every page is filled with bytes drawn from the
key it is for, so that a page in the wrong place is seen.
"""

from __future__ import annotations

import random

import torch

from hicache_storage.hybrid import HostPoolGroup, HybridCacheController, HybridIndices, PoolEntry, PrefetchRules
from hicache_storage.pools import MambaHostPool, MHAHostPool, MLAHostPool, SlotAllocator
from hicache_storage.spec import PoolHitPolicy, PoolName, StorageIdentity
from hicache_storage.transfer import DevicePages, HostPages, PageTransfers
from hicache_storage.transfer.simulator import StreamSimulator

PAGE, LAYERS = 4, 4
KV, INDEXER, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA
MAMBA_LAYERS = {1: 0, 3: 1}
"""Layers 0 and 2 attend, 1 and 3 have states."""
ATTENTION_LAYERS = {0: 0, 2: 1}


class StatePages:
    """States of a Mamba host pool, layer by layer."""

    page_size = 1

    def __init__(self, pool):
        self.layer_num, self._pool = pool.layer_num, pool

    def page_layer(self, slot, layer):
        return [buffer[slot, layer] for buffer in self._pool.buffers]


class DeviceStates:
    """The same on the device."""

    page_size = 1

    def __init__(self, layers):
        self.layer_num, self.layers = len(layers), layers

    def page_layer(self, slot, layer):
        return [tensor[slot : slot + 1] for tensor in self.layers[layer]]


def identity(parallel=None, **changes):
    fields = {"model": "m", "kv_dtype": "int16", "page_size": PAGE, "layout": "page_first"}
    made = StorageIdentity(**{**fields, **changes})
    return made if parallel is None else parallel.identity(made)


class Stack:
    """Pools of so many pages and states on the host, twice as many on the device."""

    def __init__(self, *, pages=16, states=8, mamba=True, indexer=True, seed=0, controller=HybridCacheController, **options):
        self.simulator = StreamSimulator(seed)
        self.compute = self.simulator.stream("compute")
        self.host, self.device, self.engines, entries = {}, {}, {}, []
        kv = MHAHostPool(
            size=pages * PAGE, page_size=PAGE, layer_num=2, head_num=1, head_dim=3, dtype=torch.int16, pin_memory=False
        )
        kv_layers = [[torch.zeros(2 * pages * PAGE, 1, 3, dtype=torch.int16) for _ in "kv"] for _ in range(2)]
        entries.append(self._entry(KV, kv, DevicePages(kv_layers, PAGE), HostPages(kv), is_primary_index_anchor=True))
        if indexer:
            keys = MLAHostPool(
                size=pages * PAGE, page_size=PAGE, layer_num=2, kv_cache_dim=2, dtype=torch.int16, pin_memory=False
            )
            layers = [[torch.zeros(2 * pages * PAGE, 1, 2, dtype=torch.int16)] for _ in range(2)]
            entries.append(self._entry(INDEXER, keys, DevicePages(layers, PAGE), HostPages(keys), indices_from_pool=KV))
        if mamba:
            pool = MambaHostPool(
                size=states, layer_num=2, temporal_shape=(2, 2), conv_shapes=[(3,)], temporal_dtype=torch.int16,
                conv_dtype=torch.int16, pin_memory=False,
            )  # fmt: skip
            layers = [[torch.zeros(2 * states, *shape, dtype=torch.int16) for shape in ((2, 2), (3,))] for _ in range(2)]
            entries.append(
                self._entry(MAMBA, pool, DeviceStates(layers), StatePages(pool), hit_policy=PoolHitPolicy.TRAILING_PAGES)
            )
        self.group = HostPoolGroup(entries)
        options.setdefault("rules", PrefetchRules(threshold_tokens=PAGE, policy="wait_complete", occupancy=1.0))
        options.setdefault("stop_seconds", 30.0)
        self.controller = controller(self.group, **options)

    def _entry(self, name, pool, device, host, **fields):
        device_size = 2 * pool.size
        self.host[name], self.device[name] = host, device
        self.engines[name] = PageTransfers(self.simulator, self.compute, device, host, pool)
        mapper = MAMBA_LAYERS if name == MAMBA else ATTENTION_LAYERS
        derived = "indices_from_pool" in fields
        return PoolEntry(
            name=name, host_pool=pool, copies=self.engines[name], layer_mapper=mapper.get,
            device_pool=None if derived else SlotAllocator(device_size, pool.page_size), **fields,
        )  # fmt: skip

    def close(self):
        self.controller.close()
        self.simulator.close()

    # Bytes -------------------------------------------------------------------------------------------------------

    def fill(self, where, indices, keys, ends=()):
        """Fill the pages of a span, on the device or on the host, with what belongs to their keys."""
        for tensor, wanted in self._pages(where, indices, keys, ends):
            tensor.copy_(wanted)

    def holds(self, where, indices, keys, ends=()):
        """Whether all pages of a span are what belongs to their keys."""
        return all(torch.equal(tensor, wanted) for tensor, wanted in self._pages(where, indices, keys, ends))

    def _pages(self, where, indices, keys, before):
        """Each tensor of the span, with what belongs there; endpoint 0 takes its key from the end of `before`."""
        for name in self.group.entries:
            slots, ends = self.group.slots(indices, name), self.group.endpoints(indices, name)
            if slots is None or not ends:
                continue
            for number, end in enumerate(ends):
                key = keys[end - 1] if end else before[-1]
                slot = slots.view(len(ends), -1)[number, 0].item()
                for layer in range(2):
                    for part, tensor in enumerate(getattr(self, where)[name].page_layer(slot, layer)):
                        seed = random.Random(f"{key}/{name}/{layer}/{part}").getrandbits(32)
                        noise = torch.randint(-9999, 9999, tensor.shape, generator=torch.Generator().manual_seed(seed))
                        yield tensor, noise.to(torch.int16)

    def take(self, tier, pages, ends=()):
        """Slots for so many pages with states at some endpoints."""
        needs = {KV: pages * PAGE}
        if MAMBA in self.group.entries and ends:
            needs[MAMBA] = len(ends)
        taken = getattr(self.group, tier).alloc(needs)
        assert taken is not None
        return self.group.span(taken, {MAMBA: tuple(ends)} if MAMBA in needs else {})

    def free(self):
        """Free slots of the host by pool."""
        names = sorted({KV, *self.group.side})
        return dict(zip(names, self.group.host.available(names), strict=True))

    def total(self):
        return {name: self.group.entries[name].host_pool.size for name in sorted({KV, *self.group.side})}


def tokens(pages, seed=0):
    drawn = random.Random(seed)
    return [drawn.randrange(150_000) for _ in range(pages * PAGE)]


def empty():
    return HybridIndices.empty()
