"""Copies of several pools at once, as for a hybrid model.

Attention pages and states, or latent rows and their index.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.copies import STAGING_BYTES
from hicache_storage.transfer.engine import IN, OUT, CopyStreams, PageTransfers, Transfer
from hicache_storage.transfer.layers import Acknowledgement, LayerCounter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from hicache_storage.pools import DevicePoolBase, HostPoolBase
    from hicache_storage.transfer.layers import LayerMap
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.streams import Device, Stream


class PoolPair(NamedTuple):
    """A device pool, the host pool that backs it up, and the model's layers that both hold."""

    device_pool: DevicePoolBase
    host_pool: HostPoolBase
    layers: LayerMap


class Indices(NamedTuple):
    """Slots of one pool: int64, as many whole pages on the device as on the host."""

    device: torch.Tensor
    host: torch.Tensor


class HybridTransfers(CopyStreams):
    """Moves the pages of all pools of a model on the same two streams.

    A load copies one layer of the model after the other.

    Called by one thread at a time; no call waits for a copy. Pools without pages in a transfer are
    left out of it. To be closed, or used in a `with` statement, before the pools' memory goes, as
    `PageTransfers` is.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        pools: by name.
        way, staging_bytes: as `PageTransfers` has them, for each pool.

    Raises:
        InvalidPoolError: a pool does not fit its host pool, or its layers are not as many as its
            `LayerMap` has.
    """

    def __init__(
        self,
        device: Device,
        compute: Stream,
        pools: Mapping[str, PoolPair],
        *,
        way: Way | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        if not pools:
            raise InvalidPoolError("pools must hold at least one pool")
        for name, pair in pools.items():
            if pair.device_pool.layer_num != len(pair.layers.layers):
                raise InvalidPoolError(
                    f"pool {name!r} has {pair.device_pool.layer_num} layers, its LayerMap "
                    f"{len(pair.layers.layers)}; make them equal"
                )
        # Shared by all pools: one event behind their copies stands for all of them.
        super().__init__(device, compute)
        self._layers = {name: pair.layers for name, pair in pools.items()}
        self.layer_num = 1 + max(
            layer for layers in self._layers.values() for layer in layers.layers
        )
        """Layers of the model, as far as a pool has a share in them."""
        self.engines = {
            name: PageTransfers(
                device,
                compute,
                pair.device_pool,
                pair.host_pool,
                way=way,
                staging_bytes=staging_bytes,
                streams=self.streams,
            )
            for name, pair in pools.items()
        }
        """By pool; host pages are allocated and freed through their `host_slots`."""

    def write_back(self, pages: Mapping[str, Indices]) -> Acknowledgement:
        """Copy device pages of several pools to host pages; acknowledged when all are there.

        Raises:
            InvalidTransferError: as `PageTransfers` does, for any pool, or there is no such pool;
                nothing was enqueued.
        """
        return Acknowledgement(*self._enqueue(OUT, self._checked(OUT, pages)))

    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        """Copy host pages of several pools to device pages.

        The counter counts the model's layers, not a pool's.

        Raises:
            InvalidTransferError: as `PageTransfers` does, for any pool, or there is no such pool;
                nothing was enqueued.
        """
        return LayerCounter(self._enqueue(IN, self._checked(IN, pages), self.layer_num))

    def before_overwrite(self, device_indices: Mapping[str, torch.Tensor]) -> None:
        """Let the compute stream wait for the copies that use device pages.

        To be called before a kernel overwrites them.
        """
        self._refuse_unknown(device_indices)
        for name, indices in device_indices.items():
            self.engines[name].before_overwrite(indices)

    def close(self) -> None:
        with ExitStack() as closing:
            for engine in self.engines.values():
                closing.callback(engine.close)

    def _checked(self, direction: str, pages: Mapping[str, Indices]) -> list[Transfer]:
        self._refuse_unknown(pages)
        # All pools are checked before anything is enqueued: a transfer is made as a whole or not at
        # all.
        return [
            Transfer(engine, engine.checked(direction, *indices), self._layers[name])
            for name, indices in pages.items()
            for engine in [self.engines[name]]
        ]

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.engines]
        if unknown:
            raise InvalidTransferError(
                f"no such pools: {', '.join(unknown)}; there are {', '.join(self.engines)}"
            )
