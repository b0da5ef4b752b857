"""A small hybrid model's pools on the stream simulator, and a controller over them.

KV in pages of 4 tokens, an indexer that uses KV's slots, and Mamba states. Every page is filled
with bytes drawn from the key it is for, so that a page in the wrong place is seen.
"""

from __future__ import annotations

import random

import torch

from hicache_storage.hybrid import (
    HostPoolGroup,
    HybridCacheController,
    HybridIndices,
    PoolEntry,
    PrefetchRules,
)
from hicache_storage.spec import PoolHitPolicy, PoolName, StorageIdentity
from hicache_storage.transfer import PageTransfers, PoolPair, StreamSimulator
from tests.support.pools import page_layer, pool_pair

PAGE = 4
KV, INDEXER, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA
ATTENTION, MAMBA_LAYERS = [0, 2], [1, 3]
KINDS = {
    "mha": {"head_num": 1, "head_dim": 1, "dtype": torch.int64},
    "mla": {"kv_lora_rank": 1, "dtype": torch.int64},
    "indexer": {"index_head_dim": 4, "quant_block_size": 4},
    "mamba": {
        "temporal_shape": (1,),
        "conv_shapes": [(1,)],
        "temporal_dtype": torch.int64,
        "conv_dtype": torch.int64,
    },
}
"""Pools with one integer for each slot, layer and part."""
RULES = PrefetchRules(threshold_tokens=PAGE, policy="wait_complete", occupancy=1.0)


def identity(parallel=None, **changes):
    fields = {"model": "m", "kv_dtype": "int64", "page_size": PAGE, "layout": "page_first"}
    made = StorageIdentity(**{**fields, **changes})
    return made if parallel is None else parallel.identity(made)


class Stack:
    """Pools of so many pages and states on the host, and by default twice as many on the device.

    Args:
        states: 0 for MLA and an indexer without states.
        device: slots of KV, and of states, on the device.
    """

    def __init__(self, *, pages=16, states=8, page_size=PAGE, device=None, seed=0, **options):
        self.simulator = StreamSimulator(seed)
        self.compute = self.simulator.stream("compute")
        rows, on_device = pages * page_size, device or (2 * pages * page_size, 2 * states)
        paged = {"page_size": page_size}
        pools = {
            KV: ("mha" if states else "mla", on_device[0], rows, paged | {"layers": ATTENTION}),
            INDEXER: ("indexer", on_device[0], rows, paged | {"layers": ATTENTION[:1]}),
        }
        alone = {"layers": MAMBA_LAYERS}
        pools |= {MAMBA: ("mamba", on_device[1], states, alone)} if states else {}
        pairs = {
            name: PoolPair(*pool_pair(kind, mine, hosts, **KINDS[kind], **more))
            for name, (kind, mine, hosts, more) in pools.items()
        }
        self.transfers = PageTransfers(self.simulator, self.compute, pairs)
        self.device = {name: pair.device_pool for name, pair in pairs.items()}
        self.host = {name: pair.host_pool for name, pair in pairs.items()}
        fields = {
            KV: {},
            INDEXER: {"indices_from_pool": KV, "device_pool": None},
            MAMBA: {"hit_policy": PoolHitPolicy.TRAILING_PAGES},
        }
        self.group = HostPoolGroup(
            PoolEntry(
                **{"name": name, "device_pool": pair.device_pool, **fields[name]},
                host_pool=pair.host_pool,
                host_slots=self.transfers.host_slots[name],
            )
            for name, pair in pairs.items()
        )
        options = {"rules": RULES, "stop_seconds": 30.0, **options}
        self.controller = HybridCacheController(self.group, self.transfers, **options)

    def close(self):
        self.controller.close()
        self.simulator.close()

    # Bytes
    # -------------------------------------------------------------------------------------------------------

    def fill(self, where, indices, keys, ends=()):
        """Fill the pages of a span, on the device or on the host, with what belongs to their
        keys."""
        for tensor, wanted in self._pages(where, indices, keys, ends):
            tensor.copy_(wanted)

    def holds(self, where, indices, keys, ends=()):
        """Whether all pages of a span are what belongs to their keys."""
        return all(
            torch.equal(tensor, wanted)
            for tensor, wanted in self._pages(where, indices, keys, ends)
        )

    def _pages(self, where, indices, keys, before):
        """Each tensor of the span, with what belongs there; endpoint 0 takes its key from the end
        of `before`."""
        for name in self.group.entries:
            slots, ends = self.group.slots(indices, name), self.group.endpoints(indices, name)
            if slots is None or not ends:
                continue
            for number, end in enumerate(ends):
                key = keys[end - 1] if end else before[-1]
                slot = slots.view(len(ends), -1)[number, 0].item()
                pool = getattr(self, where)[name]
                for layer in range(pool.layer_num):
                    for part, tensor in enumerate(page_layer(pool, slot, layer)):
                        seed = random.Random(f"{key}/{name}/{layer}/{part}").getrandbits(32)
                        noise = torch.randint(
                            0, 256, tensor.shape, generator=torch.Generator().manual_seed(seed)
                        )
                        yield tensor, noise.to(tensor.dtype)

    def take(self, tier, pages, ends=()):
        """Slots for so many pages with states at some endpoints."""
        needs = {KV: pages * PAGE}
        if MAMBA in self.group.entries and ends:
            needs[MAMBA] = len(ends)
        taken = getattr(self.group, tier).alloc(needs)
        assert taken is not None
        return self.group.span(taken, {MAMBA: tuple(ends)} if MAMBA in needs else {})

    def give(self, tier, indices):
        """Free what `take` took."""
        getattr(self.group, tier).free(self.group.owned(indices))

    def free(self, tier="host"):
        """Free slots of a tier by pool."""
        return getattr(self.group, tier).available({KV, *self.group.side})

    def total(self):
        return {
            name: self.group.entries[name].host_pool.size for name in sorted({KV, *self.group.side})
        }


def tokens(pages, seed=0):
    drawn = random.Random(seed)
    return [drawn.randrange(150_000) for _ in range(pages * PAGE)]


def empty():
    return HybridIndices.empty()
