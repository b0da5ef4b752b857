"""Copies of several pools at once, as for a hybrid model.

Attention pages and states, or latent rows and their index.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Self

from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.copies import STAGING_BYTES
from hicache_storage.transfer.engine import (
    IN,
    OUT,
    PageTransfers,
    copy_streams,
    load_together,
    write_back_together,
)
from hicache_storage.transfer.in_flight import wait_for_all
from hicache_storage.transfer.streams import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from hicache_storage.pools import DevicePoolBase, HostPoolBase
    from hicache_storage.transfer.engine import Transfers
    from hicache_storage.transfer.layers import Acknowledgement, LayerCounter, LayerMap
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.streams import Device, Event, Stream


class PoolPair(NamedTuple):
    """A device pool, the host pool that backs it up, and the model's layers that both hold."""

    device_pool: DevicePoolBase
    host_pool: HostPoolBase
    layers: LayerMap


class Indices(NamedTuple):
    """Slots of one pool: int64, as many whole pages on the device as on the host."""

    device: torch.Tensor
    host: torch.Tensor


class HybridTransfers:
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
        self._device = device
        self._streams = copy_streams(device)
        self._layers = {name: pair.layers for name, pair in pools.items()}
        self.layer_num = 1 + max(
            layer for layers in self._layers.values() for layer in layers.layers
        )
        """Layers of the model, as far as a pool has a share in them."""
        self.engines = {
            name: PageTransfers.between(
                device,
                compute,
                pair.device_pool,
                pair.host_pool,
                way=way,
                staging_bytes=staging_bytes,
                streams=self._streams,
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
        transfers = self._checked(OUT, pages)
        return write_back_together(transfers, self._device, self._streams[OUT])

    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        """Copy host pages of several pools to device pages.

        The counter counts the model's layers, not a pool's.

        Raises:
            InvalidTransferError: as `PageTransfers` does, for any pool, or there is no such pool;
                nothing was enqueued.
        """
        transfers = self._checked(IN, pages)
        copies = [(self._layers[name], self.engines[name].load_layer) for name in pages]
        return load_together(transfers, lambda: self._copy_layers(copies))

    def before_overwrite(self, device_indices: Mapping[str, torch.Tensor]) -> None:
        """Let the compute stream wait for the copies that use device pages.

        To be called before a kernel overwrites them.
        """
        self._refuse_unknown(device_indices)
        for name, indices in device_indices.items():
            self.engines[name].before_overwrite(indices)

    def synchronize(self) -> None:
        """Block the calling thread until all copies enqueued so far are over.

        Raises:
            StreamFailedError: one of them failed; the others are over all the same.
        """
        wait_for_all(self._streams.values())

    def close(self) -> None:
        """Wait for the copies that run, and take no more. Idempotent.

        Raises:
            StreamFailedError: a copy has failed; it is closed all the same.
        """
        with ExitStack() as closing:
            for engine in self.engines.values():
                closing.callback(engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _checked(self, direction: str, pages: Mapping[str, Indices]) -> Transfers:
        self._refuse_unknown(pages)
        # All pools are checked before anything is enqueued: a transfer is made as a whole or not at
        # all.
        return {
            self.engines[name]: self.engines[name].checked(direction, *indices)
            for name, indices in pages.items()
        }

    def _copy_layers(self, copies: Sequence[tuple[LayerMap, Callable[[int], bool]]]) -> list[Event]:
        """Copy all layers of the model; for each an event that comes when it is in every pool."""
        arrivals: list[Event] = []
        # Layers outside, pools inside: kernels of a layer wait for no later layer of any pool (rule
        # ST-2).
        for layer in range(self.layer_num):
            for layers, copy_layer in copies:
                own = layers(layer)
                if own is not None:
                    copy_layer(own)
            arrivals.append(recorded(self._device, self._streams[IN]))
        return arrivals

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.engines]
        if unknown:
            raise InvalidTransferError(
                f"no such pools: {', '.join(unknown)}; there are {', '.join(self.engines)}"
            )
