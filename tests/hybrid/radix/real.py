"""The real controller over pools of integers on the stream simulator, seen as `World` sees a
controller."""

from __future__ import annotations

import logging
from random import Random

import torch

from hicache_storage.hybrid import (
    HostPoolGroup,
    HybridCacheController,
    PoolEntry,
    PrefetchPolicy,
    PrefetchRules,
)
from hicache_storage.spec import PoolHitPolicy, PoolName, PoolTransfer, StorageIdentity
from hicache_storage.testing import MemoryStorage
from hicache_storage.transfer import PageTransfers, PoolPair, StreamSimulator
from tests.support.pools import pool_pair

KV, MAMBA, INDEXER = PoolName.KV, PoolName.MAMBA, PoolName.INDEXER
LAYERS = 2
ATTENTION = [0, 2]


class Rows:
    """Slots of pools as integers: every layer and part of a slot holds its number, shifted by which
    part it is."""

    def __init__(self, parts):
        self._parts = parts

    def __setitem__(self, slots, values):
        for shift, part in enumerate(self._parts):
            part[slots] = values + shift

    def __getitem__(self, slots):
        values = self._parts[0][slots].clone()
        for shift, part in enumerate(self._parts):
            assert torch.equal(part[slots], values + shift), (
                "the layers of a slot are not of one token"
            )
        return values


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


class RealController:
    """A `HybridCacheController` and what is below it; passes its calls on.

    With states: MHA and Mamba. Without: MLA and an indexer, whose slots are MLA's.
    """

    def __init__(self, sizes, page_size, *, states, seed=0, threshold=0):
        self.states, self.random, self._faults = states, Random(seed), Faults()
        self._identity = StorageIdentity(
            model="m", kv_dtype="int64", page_size=page_size, layout="page_first"
        )
        self.simulator = StreamSimulator(seed)
        self.compute = self.simulator.stream("compute")
        self.device_memory, self.host_memory, self.state_slots = {}, {}, None
        pools = (
            self._attention(sizes, page_size) | self._mamba(sizes)
            if states
            else self._sparse(sizes, page_size)
        )
        transfers = PageTransfers(self.simulator, self.compute, pools)
        fields = {
            KV: {"is_primary_index_anchor": True},
            INDEXER: {"indices_from_pool": KV, "device_pool": None},
            MAMBA: {"hit_policy": PoolHitPolicy.TRAILING_PAGES},
        }
        self.group = HostPoolGroup(
            PoolEntry(
                **{
                    "name": name,
                    "host_pool": pair.host_pool,
                    "device_pool": pair.device_pool,
                    "host_slots": transfers.host_slots[name],
                    **fields[name],
                }
            )
            for name, pair in pools.items()
        )
        rules = PrefetchRules(
            policy=PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=threshold, occupancy=1.0
        )
        self.controller = HybridCacheController(self.group, transfers, rules=rules)
        self.host = {name: entry.host_pool for name, entry in self.group.entries.items()}
        self.host_slots = transfers.host_slots
        self.objects, self.refuse_backups, self._loses = {}, False, 0.0
        self._arriving = set()
        self.attach()

    def __getattr__(self, name):
        return getattr(self.controller, name)

    def _attention(self, sizes, page_size):
        fields = {
            "page_size": page_size,
            "layer_num": LAYERS,
            "head_num": 1,
            "head_dim": 1,
            "dtype": torch.int64,
        }
        device, host = pool_pair("mha", sizes["device_kv"], sizes["host_kv"], **fields)
        self.kv_slots = device
        self.device_memory[KV] = Rows(
            [part[:, 0, 0] for half in (device.k_buffer, device.v_buffer) for part in half]
        )
        self.host_memory[KV] = Rows(
            [
                half[:, layer, 0, 0]
                for half in (host.k_buffer, host.v_buffer)
                for layer in range(LAYERS)
            ]
        )
        return {KV: PoolPair(device, host, ATTENTION)}

    def _sparse(self, sizes, page_size):
        fields = {
            "page_size": page_size,
            "layer_num": LAYERS,
            "kv_cache_dim": 1,
            "dtype": torch.int64,
        }
        device, host = pool_pair("mla", sizes["device_kv"], sizes["host_kv"], **fields)
        # Eight bytes for each token: four of a key, and one scale.
        fields = {
            "page_size": page_size,
            "layer_num": 1,
            "index_head_dim": 4,
            "quant_block_size": 4,
        }
        index, host_index = pool_pair("indexer", sizes["device_kv"], sizes["host_kv"], **fields)
        self.kv_slots = device
        keys, host_keys = (pool.index_buffer for pool in (index, host_index))
        self.device_memory[KV] = Rows(
            [*(rows[:, 0, 0] for rows in device.kv_buffer), keys[0].view(torch.int64).view(-1)]
        )
        self.host_memory[KV] = Rows(
            [
                *(host.kv_buffer[:, layer, 0, 0] for layer in range(LAYERS)),
                host_keys.view(-1).view(torch.int64),
            ]
        )
        return {
            KV: PoolPair(device, host, ATTENTION),
            INDEXER: PoolPair(index, host_index, [0]),
        }

    def _mamba(self, sizes):
        fields = {
            "layer_num": LAYERS,
            "temporal_shape": (1,),
            "conv_shapes": [(1,)],
            "temporal_dtype": torch.int64,
            "conv_dtype": torch.int64,
        }
        device, host = pool_pair("mamba", sizes["device_states"], sizes["host_states"], **fields)
        self.state_slots = device
        parts = [(buffer, layer) for buffer in (0, 1) for layer in range(LAYERS)]
        on_device, on_host = ([pool.temporal_buffer, *pool.conv_buffers] for pool in (device, host))
        self.device_memory[MAMBA] = Rows(
            [on_device[buffer][layer, :, 0] for buffer, layer in parts]
        )
        self.host_memory[MAMBA] = Rows([on_host[buffer][:, layer, 0, 0] for buffer, layer in parts])
        return {MAMBA: PoolPair(device, host, [1, 3])}

    def close(self):
        self.controller.close()
        self.simulator.close()
        self._faults.close()
        assert not self.simulator.races
        assert not self._faults.seen

    # -- the storage

    def attach(self, *, empty=False):
        if empty:
            self.objects = {}
        self.storage = MemoryStorage(self._identity, self.objects)
        self.storage.before = self._before
        self.controller.attach(self.storage)

    def _before(self, operation):
        if self.refuse_backups and operation == "write":
            raise OSError("no space left on device")
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
        side = (
            PoolTransfer(MAMBA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            if self.states
            else None
        )
        side = side or PoolTransfer(INDEXER, keys=keys)
        return self.storage.batch_exists_v2(keys, [side]).restorable_prefix_pages

    # -- what the engine does about copies

    def load(self, host, node_ids, *, into=None):
        taken = self.controller.load(host, node_ids, into=into)
        self._arriving |= set(taken.anchor.tolist()) if taken else set()
        return taken

    def wait_for_loads(self, consumer):
        self.controller.layer_counter(consumer).synchronize()
        self._arriving.clear()

    def before_overwrite(self, device):
        self.controller.before_overwrite(device)
        # The test writes with its own thread, not with kernels.
        self.compute.synchronize()

    def arriving(self):
        """Device slots of KV whose load has not been waited for."""
        return self._arriving

    def prefetched_slots(self):
        """Host slots of prefetches that have not been handed over."""
        prefetcher = self.controller._prefetcher
        for operation in prefetcher._live:
            if operation.done:
                yield from self.group.owned(prefetcher._delivered(operation)).items()
                continue
            if operation.buffers:
                yield from operation.buffers.all_slots().items()
