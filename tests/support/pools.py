"""Pools of any kind, given by their fields."""

from __future__ import annotations

from typing import Any

from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
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


def page_layer(pool: Any, first_slot: int, layer: int) -> list[Any]:
    """A layer's share of one page: one view (rows per page, ...) for each part."""
    return [part[first_slot // pool.page_size] for part in pool.layer(layer)]
