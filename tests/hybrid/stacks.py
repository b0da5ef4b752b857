"""Configs of small stacks on the CPU, and spans of random bytes that go through them."""

from __future__ import annotations

import random
import time
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
)
from hicache_storage.spec import PoolName
from tests.support.pools import page_layer

PAGE = 4
GRID = 8
ATTENTION = AttentionGeometry(layers=(0, 2), head_num=2, head_dim=4, dtype=torch.int16)
LATENT = MLAGeometry(layers=(0, 2), kv_lora_rank=6, qk_rope_head_dim=2, dtype=torch.int16)
MAMBA = MambaGeometry(
    layers=(1, 3),
    temporal_shape=(2, 3),
    conv_shapes=((3, 2),),
    temporal_dtype=torch.int32,
    conv_dtype=torch.int16,
)
INDEXER = IndexerGeometry(layers=(0,), index_head_dim=4, quant_block_size=2)
COMMON = {
    "page_size": PAGE,
    "device_tokens": 16 * PAGE,
    "host_tokens": 16 * PAGE,
    "device": "cpu",
    "prefetch": PrefetchRules(policy="wait_complete", threshold_tokens=PAGE, occupancy=1.0),
}


def mamba_config(**changes):
    fields = {
        "attention": ATTENTION,
        "mamba": MAMBA,
        "device_states": 8,
        "host_states": 8,
        "checkpoint_interval": GRID,
    }
    return StackConfig(**{**COMMON, **fields, **changes})


def dsa_config(**changes):
    return StackConfig(**{**COMMON, "attention": LATENT, "indexer": INDEXER, **changes})


def build(config, **options):
    """The stack of a config, with 30 s for what is to end."""
    return build_hybrid_stack(replace(config, stop_seconds=30.0), **options)


class Session:
    """A prefix of random bytes in a stack: two checkpoints of pages, and a state after each.

    Args:
        seed: of the tokens, and of the bytes, which are the same in every stack.
        length: more or fewer checkpoints than two; the tokens begin with the same. With bigram keys
            there is one token more.
    """

    LENGTH = 2 * GRID

    def __init__(self, stack, seed=0, length=LENGTH):
        drawn = random.Random(seed)
        self.stack, self.cache = stack, stack.cache
        self.tokens = [drawn.randrange(150_000) for _ in range(length + self.stack.config.bigram)]
        self._seed, self._length = seed, length

    def insert(self):
        """Write the prefix to the device, as a model would, and hand it to the cache."""
        length = self._length
        rows = self.cache.alloc_kv(length)
        states = {}
        if self.cache.has_states:
            states = {end: int(self.cache.alloc_state()) for end in range(GRID, length + 1, GRID)}
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
        state = int(self.cache.alloc_state()) if self.cache.has_states else None
        loaded = self.cache.load(lock, state)
        self.stack.controller.layer_counter(self.cache.start_loading()).synchronize()
        found = match.state_slot if loaded.state_slot is None else loaded.state_slot
        for tensor, wanted in self._memory(
            loaded.device_indices, {} if found is None else {match.length: found}
        ):
            assert torch.equal(tensor.cpu(), wanted)
        self.cache.unlock(lock)
        if state is not None:
            self.stack.states.free(torch.tensor([state]))
        return match.length, match.host_length

    def fetch(self):
        """Wait for what the storage has of it."""
        if self.cache.prefetch_from_storage("session", self.tokens):
            end = time.monotonic() + 60
            while not self.cache.check_prefetch("session"):
                assert time.monotonic() < end
                self.cache.poll()

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
                for layer in range(pool.layer_num):
                    for part, tensor in enumerate(page_layer(pool, slot, layer)):
                        seed = random.Random(
                            f"{self._seed}/{name}/{number}/{layer}/{part}"
                        ).getrandbits(32)
                        noise = torch.randint(
                            0, 256, tensor.shape, generator=torch.Generator().manual_seed(seed)
                        )
                        yield tensor, noise.to(tensor.dtype)
