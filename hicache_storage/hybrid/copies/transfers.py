"""Copies of all pools of a span as one, and their progress by layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.hybrid.copies.operations import AllDone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.copies.operations import SupportsDone
    from hicache_storage.hybrid.pools.group import HostPoolGroup, PoolEntry
    from hicache_storage.transfer import Indices, LayerCounter, Stream


class LoadProgress(Protocol):
    """Progress of a load, by the layers of the model."""

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer has arrived; call it before the layer's kernels."""
        ...

    def done(self) -> bool:
        """Return whether all layers have arrived; does not block."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all layers have arrived."""
        ...


class SpanTransfers(Protocol):
    """Copies pages of several pools at once; where it raises, none of them."""

    def write_back(self, pages: Mapping[str, Indices]) -> SupportsDone:
        """Copy device pages to host pages, by pool."""
        ...

    def load(self, pages: Mapping[str, Indices]) -> LoadProgress:
        """Copy host pages to device pages, by pool, layer by layer."""
        ...


class PerPoolTransfers:
    """Copies each pool with its own engine.

    `HybridTransfers` copies all pools on the same streams, in the order of the layers.
    """

    def __init__(self, group: HostPoolGroup) -> None:
        self._entries: Mapping[str, PoolEntry] = {
            str(name): entry for name, entry in group.entries.items()
        }

    def write_back(self, pages: Mapping[str, Indices]) -> SupportsDone:
        return AllDone(
            [
                self._entries[name].copies.write_back(device, host)
                for name, (device, host) in pages.items()
            ]
        )

    def load(self, pages: Mapping[str, Indices]) -> HybridLayerCounter:
        return HybridLayerCounter(
            {
                name: (
                    self._entries[name].layer_mapper,
                    self._entries[name].copies.load(host, device),
                )
                for name, (device, host) in pages.items()
            }
        )


class CombinedProgress:
    """Several loads as one: a layer has arrived when it has in all of them."""

    def __init__(self, loads: Sequence[LoadProgress]) -> None:
        self._loads = loads

    def wait(self, layer: int, stream: Stream) -> None:
        for load in self._loads:
            load.wait(layer, stream)

    def done(self) -> bool:
        return all(load.done() for load in self._loads)

    def synchronize(self) -> None:
        for load in self._loads:
            load.synchronize()


class HybridLayerCounter:
    """Layer counter of a load of several pools (rule ST-2).

    Without pools it waits for nothing.

    Args:
        pools: by name, the map from layers of the model to the pool's, and the pool's counter.
    """

    def __init__(
        self, pools: Mapping[str, tuple[Callable[[int], int | None], LayerCounter]]
    ) -> None:
        self._pools = dict(pools)

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer of the model is in every pool that holds it."""
        for own_layer, counter in self._pools.values():
            own = own_layer(layer)
            if own is not None:
                counter.wait(own, stream)

    def done(self) -> bool:
        return all(counter.done() for _, counter in self._pools.values())

    def synchronize(self) -> None:
        for _, counter in self._pools.values():
            counter.synchronize()
