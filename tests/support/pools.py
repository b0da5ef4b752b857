"""Pairs of a device pool and the host pool that backs it up, on the CPU."""

from __future__ import annotations

from typing import Any

from hicache_storage.pools import (
    AttentionGeometry,
    DevicePool,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PagedHostPool,
    PoolGeometry,
)

SHAPES: dict[str, type[PoolGeometry]] = {
    "mha": AttentionGeometry,
    "mla": MLAGeometry,
    "mamba": MambaGeometry,
    "indexer": IndexerGeometry,
}
"""By kind of state."""
OWN_FIELDS = {"size", "page_size", "layout", "pin_memory", "device"}


def make_pool(pool: type, kind: str, **fields: Any) -> Any:
    """Make a pool of its own arguments and of the fields of its shape."""
    own = {name: fields.pop(name) for name in OWN_FIELDS & fields.keys()}
    return pool(SHAPES[kind](**fields), **own)


def pool_pair(kind: str, device_size: int, host_size: int, **fields: object) -> tuple[Any, Any]:
    """Make a device pool on the CPU and a host pool of pageable memory; sizes in slots."""
    return (
        make_pool(DevicePool, kind, size=device_size, device="cpu", **fields),
        make_pool(PagedHostPool, kind, size=host_size, pin_memory=False, **fields),
    )


def page_layer(pool: Any, first_slot: int, layer: int) -> list[Any]:
    """A layer's share of one page: one view (rows per page, ...) for each part."""
    return [part[first_slot // pool.page_size] for part in pool.layer(layer)]
