"""Pairs of a device pool and the host pool that backs it up, on the CPU."""

from __future__ import annotations

from typing import Any

from hicache_storage.pools import (
    IndexerDevicePool,
    IndexerHostPool,
    MambaDevicePool,
    MambaHostPool,
    MHADevicePool,
    MHAHostPool,
    MLADevicePool,
    MLAHostPool,
)

POOL_KINDS: dict[str, tuple[Any, Any]] = {
    "mha": (MHADevicePool, MHAHostPool),
    "mla": (MLADevicePool, MLAHostPool),
    "mamba": (MambaDevicePool, MambaHostPool),
    "indexer": (IndexerDevicePool, IndexerHostPool),
}
"""The classes for a device and for the host, by kind."""


def pool_pair(kind: str, device_size: int, host_size: int, **fields: object) -> tuple[Any, Any]:
    """Make a device pool on the CPU and a host pool of pageable memory; sizes in slots."""
    device, host = POOL_KINDS[kind]
    return (
        device(size=device_size, device="cpu", **fields),
        host(size=host_size, pin_memory=False, **fields),
    )
