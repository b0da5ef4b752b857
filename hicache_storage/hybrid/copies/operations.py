"""Copies between device and host that are queued or in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hicache_storage.hybrid.pools.indices import HybridIndices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.transfer import LayerCounter, Stream


class SupportsDone(Protocol):
    """An acknowledgement or a layer counter of a copy."""

    def done(self) -> bool:
        """Return whether the copy has ended; does not block."""
        ...


class LoadProgress:
    """Several loads as one: a layer has arrived when it has in all of them.

    At once if there are none.
    """

    def __init__(self, loads: Sequence[LayerCounter] = ()) -> None:
        self._loads = loads

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer has arrived; call it before the layer's kernels."""
        for load in self._loads:
            load.wait(layer, stream)

    def done(self) -> bool:
        """Return whether all layers have arrived; does not block."""
        return all(load.done() for load in self._loads)

    def synchronize(self) -> None:
        """Block the calling thread until all layers have arrived."""
        for load in self._loads:
            load.synchronize()


class PendingCopy:
    """Completion of a copy that is queued or in flight.

    Its host pages stay reserved until then.
    """

    def __init__(self) -> None:
        self._copy: SupportsDone | None = None

    def mark_started(self, copy: SupportsDone) -> None:
        """Set the copy that was launched."""
        self._copy = copy

    def query(self) -> bool:
        """Return whether the copy was launched and has ended; does not block.

        Raises:
            StreamFailedError: a copy failed.
        """
        return self._copy is not None and self._copy.done()


@dataclass(slots=True, eq=False)
class CacheOperation:
    """A span to be copied in one direction, all pools."""

    device: HybridIndices
    host: HybridIndices
    node_ids: list[int]
    """Ids of the cache nodes that it copies; returned when the copy has ended."""
    priority: int = 0
    """Smaller is more urgent."""
    pending: list[PendingCopy] = field(default_factory=lambda: [PendingCopy()])

    @staticmethod
    def merge_ops(operations: Sequence[CacheOperation], page_size: int) -> CacheOperation:
        """Merge operations in their order, with the most urgent priority.

        A single operation is returned as it is.

        Args:
            operations: one at least.
            page_size: tokens per page of the anchor.
        """
        # The common case, without copies of the tensors.
        if len(operations) == 1:
            return operations[0]
        return CacheOperation(
            HybridIndices.concat([operation.device for operation in operations], page_size),
            HybridIndices.concat([operation.host for operation in operations], page_size),
            [node for operation in operations for node in operation.node_ids],
            min(operation.priority for operation in operations),
            [pending for operation in operations for pending in operation.pending],
        )

    def mark_started(self, copy: SupportsDone) -> None:
        """Set the copy that was launched."""
        for pending in self.pending:
            pending.mark_started(copy)

    def done(self) -> bool:
        """Return whether all of the span has been copied."""
        return all(pending.query() for pending in self.pending)
