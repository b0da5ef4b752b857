"""Small hybrid models' stacks on the CPU, and bytes that go through them.

Every page is filled with bytes drawn from what it is for, so that a page in the wrong place is seen.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from hicache_storage.hybrid import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PrefetchRules,
    StackConfig,
    build_hybrid_stack,
    page_hashes,
)
from hicache_storage.spec import PoolName, StorageIdentity
from hicache_storage.transfer import StreamSimulator
from tests.support.pools import page_layer
from tests.support.waiting import eventually

PAGE = 4
GRID = 8
KV, INDEXER, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA
RULES = PrefetchRules(threshold_tokens=PAGE, policy="wait_complete", occupancy=1.0)
ATTENTION = AttentionGeometry(layers=(0, 2), head_num=2, head_dim=4, dtype=torch.int16)
LATENT = MLAGeometry(layers=(0, 2), kv_lora_rank=6, qk_rope_head_dim=2, dtype=torch.int16)
STATES = MambaGeometry(
    layers=(1, 3),
    temporal_shape=(2, 3),
    conv_shapes=((3, 2),),
    temporal_dtype=torch.int32,
    conv_dtype=torch.int16,
)
INDEX_KEYS = IndexerGeometry(layers=(0,), index_head_dim=4, quant_block_size=2)
COMMON = {
    "page_size": PAGE,
    "device_tokens": 16 * PAGE,
    "host_tokens": 16 * PAGE,
    "device": "cpu",
    "prefetch": RULES,
}
# Pools with one integer for each slot, layer and part.
INTEGERS = {
    "mha": AttentionGeometry(layers=(0, 2), head_num=1, head_dim=1, dtype=torch.int64),
    "mla": MLAGeometry(layers=(0, 2), kv_lora_rank=1, dtype=torch.int64),
    "indexer": IndexerGeometry(layers=(0,), index_head_dim=4, quant_block_size=4),
    "mamba": MambaGeometry(
        layers=(1, 3),
        temporal_shape=(1,),
        conv_shapes=((1,),),
        temporal_dtype=torch.int64,
        conv_dtype=torch.int64,
    ),
}


def mamba_config(**changes):
    fields = {
        "attention": ATTENTION,
        "mamba": STATES,
        "device_states": 8,
        "host_states": 8,
        "checkpoint_interval": GRID,
    }
    return StackConfig(**{**COMMON, **fields, **changes})


def dsa_config(**changes):
    return StackConfig(**{**COMMON, "attention": LATENT, "indexer": INDEX_KEYS, **changes})


def build(config, storage=None, **options):
    """The stack of a config, with 30 s for what is to end, and a storage attached to it."""
    stack = build_hybrid_stack(replace(config, stop_seconds=30.0), **options)
    if storage is not None:
        stack.attach(storage)
    return stack


def identity(parallel=None, **changes):
    fields = {"model": "m", "kv_dtype": "int64", "page_size": PAGE, "layout": "page_first"}
    made = StorageIdentity(**{**fields, **changes})
    return made if parallel is None else parallel.identity(made)


def page_noise(pool, slot, label):
    """Each tensor of a page, with the bytes that belong to a label."""
    for layer in range(pool.layer_num):
        for part, tensor in enumerate(page_layer(pool, slot, layer)):
            seed = random.Random(f"{label}/{layer}/{part}").getrandbits(32)
            noise = torch.randint(
                0, 256, tensor.shape, generator=torch.Generator().manual_seed(seed)
            )
            yield tensor, noise.to(tensor.dtype)


class Stack:
    """KV in pages of 4 tokens, an indexer that uses KV's slots, and Mamba states, on the stream
    simulator, with a controller over them.

    So many pages and states are on the host, and by default twice as many on the device.

    Args:
        states: 0 for MLA and an indexer without states.
        device: slots of KV, and of states, on the device.
    """

    def __init__(
        self, *, pages=16, states=8, page_size=PAGE, device=None, seed=0, rank_group=None, **options
    ):
        self.simulator = StreamSimulator(seed)
        self.compute = self.simulator.stream("compute")
        rows, on_device = pages * page_size, device or (2 * pages * page_size, 2 * states)
        with_states = {
            "mamba": INTEGERS["mamba"],
            "device_states": on_device[1],
            "host_states": states,
        }
        fields = {
            **COMMON,
            "attention": INTEGERS["mha" if states else "mla"],
            "indexer": INTEGERS["indexer"],
            "page_size": page_size,
            "device_tokens": on_device[0],
            "host_tokens": rows,
            "stop_seconds": 30.0,
            **(with_states if states else {}),
            **options,
        }
        built = build_hybrid_stack(
            StackConfig(**fields), rank_group=rank_group, streams=(self.simulator, self.compute)
        )
        self._built = built
        self.controller, self.transfers = built.controller, built.transfers
        self.group = built.controller.group
        self.device, self.host = built.device_pools, built.host_pools

    def close(self):
        self._built.close()
        self.simulator.close()

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
            for number, end in enumerate(ends):
                key = keys[end - 1] if end else before[-1]
                slot = slots.view(len(ends), -1)[number, 0].item()
                pool = getattr(self, where)[name]
                yield from page_noise(pool, slot, f"{key}/{name}")

    def take(self, tier, pages, ends=()):
        """Slots for so many pages with states at some endpoints."""
        needs = {KV: pages * PAGE}
        if MAMBA in self.group.entries and ends:
            needs[MAMBA] = len(ends)
        taken = getattr(self.group, tier).alloc(needs)
        assert taken is not None
        return self.group.span(taken, tuple(ends) if MAMBA in needs else ())

    def give(self, tier, indices):
        """Free what `take` took."""
        getattr(self.group, tier).free(self.group.owned(indices))

    def free(self, tier="host"):
        """Free slots of a tier by pool."""
        return getattr(self.group, tier).available(self._owners())

    def total(self):
        return {name: self.group.entries[name].host_pool.size for name in self._owners()}

    def _owners(self):
        return [KV, MAMBA] if self.group.has_states else [KV]


def tokens(pages, seed=0):
    drawn = random.Random(seed)
    return [drawn.randrange(150_000) for _ in range(pages * PAGE)]


def hashes(pages, seed=0):
    """Keys of the pages of `tokens`."""
    return page_hashes(tokens(pages, seed), PAGE)


class Session:
    """A prefix of random bytes in a stack: two checkpoints of pages, and a state after each.

    Args:
        seed: of the bytes: ranks hold others of the same tokens.
    """

    LENGTH = 2 * GRID

    def __init__(self, stack, seed=0):
        self.stack = stack
        self.cache = stack.cache
        self._seed = seed
        self.tokens = list(range(self.LENGTH))

    def insert(self):
        """Write the prefix to the device, as a model would, and hand it to the cache."""
        rows = self.cache.alloc_kv(self.LENGTH)
        states = {}
        if self.cache.has_states:
            states = {end: int(self.cache.alloc_state()) for end in (GRID, self.LENGTH)}
        self.stack.compute.synchronize()
        for tensor, wanted in self._memory(rows, states):
            tensor.copy_(wanted)
        return self.cache.insert(self.tokens, rows, states)

    def restore(self):
        """Load the prefix, wait for it, and compare its bytes; how many tokens came, and what came
        from the host."""
        match = self.cache.match(self.tokens)
        if not match.length:
            return 0, 0
        lock = self.cache.lock(match)
        loaded = self.cache.load(lock)
        self.cache.start_loading().synchronize()
        found = match.state_slot if loaded.state_slot is None else loaded.state_slot
        for tensor, wanted in self._memory(
            loaded.device_indices, {} if found is None else {match.length: found}
        ):
            assert torch.equal(tensor.cpu(), wanted)
        self.cache.unlock(lock)
        if loaded.state_slot is not None:
            self.stack.device_pools[MAMBA].free(torch.tensor([loaded.state_slot]))
        return match.length, match.host_length

    def fetch(self):
        """Wait for what the storage has of it."""
        if self.cache.prefetch_from_storage("session", self.tokens):
            eventually(lambda: self.cache.poll() or self.cache.check_prefetch("session"))

    def comes_back(self):
        """All of it does from the storage, after the cache has forgotten it."""
        self.insert()
        assert self.stack.drain(60)
        self.cache.reset()
        self.fetch()
        assert self.restore() == (self.LENGTH, self.LENGTH)
        assert self.stack.drain(60)

    def _memory(self, rows, states):
        """Each tensor of the prefix on the device, with what belongs there."""
        for name, pool in self.stack.device_pools.items():
            if name == PoolName.MAMBA:
                pages = [(end, slot) for end, slot in states.items()]
            else:
                pages = list(enumerate(rows.view(-1, PAGE)[:, 0].tolist()))
            for number, slot in pages:
                yield from page_noise(pool, slot, f"{self._seed}/{name}/{number}")
