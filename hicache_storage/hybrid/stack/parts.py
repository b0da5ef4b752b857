"""The pools of a stack, and the copies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.groups import HostPoolGroup, PoolEntry
from hicache_storage.spec import PoolHitPolicy, PoolName
from hicache_storage.transfer import HybridTransfers, LayerMap, PoolPair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.hybrid.stack.config import StackConfig
    from hicache_storage.hybrid.stack.geometry import PoolGeometry
    from hicache_storage.pools import DevicePoolBase, HostPoolBase
    from hicache_storage.transfer import Device, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Pools by name, and what copies between them."""

    device_pools: dict[PoolName, DevicePoolBase]
    host_pools: dict[PoolName, HostPoolBase]
    compute: Stream
    transfers: HybridTransfers
    group: HostPoolGroup


def make_parts(config: StackConfig, host_slots: Mapping[PoolName, int], device: Device, compute: Stream) -> Parts:
    """Allocate all pools, and make their transfer engines.

    Args:
        host_slots: of each host pool.
        device: makes the streams of the copies.
        compute: the model's.

    Raises:
        InvalidPoolError: there is not that much memory, or `backend` cannot reach it.
    """
    pairs = {name: _pair(config, name, geometry, host_slots[name]) for name, geometry in config.pools.items()}
    transfers = HybridTransfers(device, compute, {str(name): pair for name, pair in pairs.items()}, backend=config.backend)
    group = HostPoolGroup(_entry(name, pair, transfers) for name, pair in pairs.items())
    return Parts(
        {name: pair.device_pool for name, pair in pairs.items()},
        {name: pair.host_pool for name, pair in pairs.items()},
        compute,
        transfers,
        group,
    )


def _pair(config: StackConfig, name: PoolName, geometry: PoolGeometry, on_host: int) -> PoolPair:
    on_device, _, page_size = config.slots_of(name)
    return PoolPair(
        geometry.device_pool(on_device, page_size, torch.device(config.device)),
        geometry.host_pool(on_host, page_size, config.layout_of(name), pin_memory=config.pin_memory),
        LayerMap(geometry.layers),
    )


def _entry(name: PoolName, pair: PoolPair, transfers: HybridTransfers) -> PoolEntry:
    derived = name is PoolName.INDEXER
    return PoolEntry(
        name=name,
        host_pool=pair.host_pool,
        device_pool=None if derived else pair.device_pool,
        copies=transfers.engines[name],
        layer_mapper=pair.layers,
        is_primary_index_anchor=name is PoolName.KV,
        indices_from_pool=PoolName.KV if derived else None,
        hit_policy=PoolHitPolicy.TRAILING_PAGES if name is PoolName.MAMBA else PoolHitPolicy.ALL_PAGES,
    )
