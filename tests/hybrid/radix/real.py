"""The real controller over pools of integers on the stream simulator, seen as `World` sees a controller."""

from __future__ import annotations

import torch

from hicache_storage.hybrid import HostPoolGroup, HybridCacheController, PoolEntry, PrefetchPolicy, PrefetchRules
from hicache_storage.pools import MambaDevicePool, MambaHostPool, MHADevicePool, MHAHostPool
from hicache_storage.spec import PoolHitPolicy, PoolName, StorageIdentity
from hicache_storage.transfer import LayerMap, PageTransfers
from hicache_storage.transfer.simulator import StreamSimulator
from tests.conftest import DictStorage

KV, MAMBA = PoolName.KV, PoolName.MAMBA
LAYERS = 2


class Rows:
    """Slots of a pool as integers: every layer and part of a slot holds its number, shifted by which part it is."""

    def __init__(self, parts):
        self._parts = parts

    def __setitem__(self, slots, values):
        for shift, part in enumerate(self._parts):
            part[slots] = values + shift

    def __getitem__(self, slots):
        values = self._parts[0][slots].clone()
        for shift, part in enumerate(self._parts):
            assert torch.equal(part[slots], values + shift), "the layers of a slot are not of one token"
        return values


class RealController:
    """A `HybridCacheController` and what is below it; passes its calls on."""

    def __init__(self, sizes, page_size, *, states, seed=0, threshold=0):
        self.states, self._identity = (
            states,
            StorageIdentity(model="m", kv_dtype="int64", page_size=page_size, layout="page_first"),
        )
        self.simulator = StreamSimulator(seed, pause_seconds=0.0001)
        self.compute = self.simulator.stream("compute")
        kv = {"page_size": page_size, "layer_num": LAYERS, "head_num": 1, "head_dim": 1, "dtype": torch.int64}
        self.kv_slots = MHADevicePool(size=sizes["device_kv"], device="cpu", **kv)
        host_kv = MHAHostPool(size=sizes["host_kv"], **kv)
        streams = self.simulator.stream("write-back"), self.simulator.stream("load")
        entries = [self._entry(KV, self.kv_slots, host_kv, LayerMap([0, 2]), streams, is_primary_index_anchor=True)]
        self.device_memory = {
            KV: Rows([part[:, 0, 0] for half in (self.kv_slots.k_buffer, self.kv_slots.v_buffer) for part in half])
        }
        self.host_memory = {
            KV: Rows([half[:, layer, 0, 0] for half in (host_kv.k_buffer, host_kv.v_buffer) for layer in range(LAYERS)])
        }
        self.state_slots = None
        if states:
            shapes = {
                "layer_num": LAYERS, "temporal_shape": (1,), "conv_shapes": [(1,)],
                "temporal_dtype": torch.int64, "conv_dtype": torch.int64,
            }  # fmt: skip
            self.state_slots = MambaDevicePool(size=sizes["device_states"], device="cpu", **shapes)
            host = MambaHostPool(size=sizes["host_states"], **shapes)
            entries.append(
                self._entry(MAMBA, self.state_slots, host, LayerMap([1, 3]), streams, hit_policy=PoolHitPolicy.TRAILING_PAGES)
            )
            device_parts = [buffer[layer, :, 0] for buffer in (self.state_slots.temporal_buffer, *self.state_slots.conv_buffers)
                            for layer in range(LAYERS)]  # fmt: skip
            host_parts = [
                buffer[:, layer, 0, 0] for buffer in (host.temporal_buffer, *host.conv_buffers) for layer in range(LAYERS)
            ]
            self.device_memory[MAMBA], self.host_memory[MAMBA] = Rows(device_parts), Rows(host_parts)
        self.group = HostPoolGroup(entries)
        rules = PrefetchRules(policy=PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=threshold, occupancy=1.0)
        self.controller = HybridCacheController(self.group, rules=rules)
        self.host = {name: entry.host_pool for name, entry in self.group.entries.items()}
        self.host_slots = {name: entry.copies.host_slots for name, entry in self.group.entries.items()}
        self.objects, self.refuse_backups = {}, False
        self._arriving = set()
        self.attach()

    def __getattr__(self, name):
        return getattr(self.controller, name)

    def _entry(self, name, device_pool, host_pool, layers, streams, **fields):
        copies = PageTransfers.between(self.simulator, self.compute, device_pool, host_pool, streams=streams)
        return PoolEntry(name=name, host_pool=host_pool, device_pool=device_pool, copies=copies, layer_mapper=layers, **fields)

    def close(self):
        self.controller.close()
        self.simulator.close()
        assert not self.simulator.races

    def attach(self, *, empty=False):
        if empty:
            self.objects = {}
        storage = DictStorage(self._identity, self.objects)
        storage.before = self._before
        self.controller.attach(storage)

    def _before(self, operation):
        if self.refuse_backups and operation == "write":
            raise OSError("no space left on device")

    # -- what the engine does about copies

    def load(self, host, node_ids, *, into=None):
        taken = self.controller.load(host, node_ids, into=into)
        self._arriving |= set(taken.anchor.tolist()) if taken else set()
        return taken

    def start_loading(self):
        self.consumer = self.controller.start_loading()
        return self.consumer

    def wait_for_loads(self):
        self.controller.layer_counter(self.consumer).synchronize()
        self._arriving.clear()

    def before_overwrite(self, device):
        self.controller.before_overwrite(device)
        # The test writes with its own thread, not with kernels.
        self.compute.synchronize()

    def arriving(self):
        """Device slots of KV whose load has not been waited for."""
        return self._arriving

    def landing(self):
        """Host slots of prefetches under way."""
        for operation in self.controller._prefetcher._live:
            for slots in (operation.landing.slots, *operation.landing.sets) if operation.landing else ():
                yield from slots.items()
