"""Copies of all pools of a span as one: what the controller asks for, and each pool's engine for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.hybrid.operations import Over

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.groups import HostPoolGroup, PoolEntry
    from hicache_storage.hybrid.operations import Done
    from hicache_storage.transfer import Indices, LayerCounter, Stream


class Arrivals(Protocol):
    """What a model waits for while its pages are loaded; layers are the model's."""

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer has arrived; call it before the layer's kernels are launched."""
        ...

    def done(self) -> bool:
        """Whether all layers have arrived; does not block."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all layers have arrived."""
        ...


class SpanTransfers(Protocol):
    """Moves several pools' pages at once, all of them or, where it raises, none."""

    def write_back(self, pages: Mapping[str, Indices]) -> Done:
        """Copy device pages to host pages, by pool."""
        ...

    def load(self, pages: Mapping[str, Indices]) -> Arrivals:
        """Copy host pages to device pages, by pool, layer by layer."""
        ...


class PoolwiseTransfers:
    """Moves each pool with its own engine. `HybridTransfers` moves all on the same streams, in the order of the layers."""

    def __init__(self, group: HostPoolGroup) -> None:
        self._entries: Mapping[str, PoolEntry] = {str(name): entry for name, entry in group.entries.items()}

    def write_back(self, pages: Mapping[str, Indices]) -> Done:
        return Over([self._entries[name].copies.write_back(device, host) for name, (device, host) in pages.items()])

    def load(self, pages: Mapping[str, Indices]) -> HybridLayerCounter:
        return HybridLayerCounter(
            {
                name: (self._entries[name].layer_mapper, self._entries[name].copies.load(host, device))
                for name, (device, host) in pages.items()
            }
        )


class AllArrivals:
    """Several loads as one: what they bring may be used when all have brought it."""

    def __init__(self, loads: Sequence[Arrivals]) -> None:
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
    """The layers of a load of several pools as they arrive (rule ST-2); without pools it waits for nothing.

    Args:
        pools: by name, how a layer of the model maps to the pool's own, and that pool's counter.
    """

    def __init__(self, pools: Mapping[str, tuple[Callable[[int], int | None], LayerCounter]]) -> None:
        self._pools = dict(pools)

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer of the model has arrived in every pool that has a share in it."""
        for own_layer, counter in self._pools.values():
            own = own_layer(layer)
            if own is not None:
                counter.wait(own, stream)

    def done(self) -> bool:
        return all(counter.done() for _, counter in self._pools.values())

    def synchronize(self) -> None:
        for _, counter in self._pools.values():
            counter.synchronize()
