"""Copies between device and host that wait to be started, and what tells that they are over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hicache_storage.hybrid.indices import HybridIndices

if TYPE_CHECKING:
    from collections.abc import Sequence


class Done(Protocol):
    """An acknowledgement or a layer counter: something that tells when a copy is over."""

    def done(self) -> bool: ...


class Over:
    """Done when all its parts are; at once without any."""

    def __init__(self, parts: Sequence[Done] = ()) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class Flight:
    """A copy of all pools from being asked for to being over; holds its host pages all that time."""

    def __init__(self) -> None:
        self._copy: Done | None = None

    def started(self, copy: Done) -> None:
        """It is on its way."""
        self._copy = copy

    def query(self) -> bool:
        """Whether it is over; does not block.

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
    """The cache nodes it is for; told when it is over."""
    priority: int = 0
    """Smaller is more urgent."""
    flights: list[Flight] = field(default_factory=lambda: [Flight()])

    @staticmethod
    def merge_ops(operations: Sequence[CacheOperation], page_size: int) -> CacheOperation:
        """Several operations as one, in their order, with the most urgent priority; a single one is returned as it is.

        Args:
            operations: one at least.
            page_size: tokens per page of the anchor.
        """
        if len(operations) == 1:
            return operations[0]
        return CacheOperation(
            HybridIndices.joined([operation.device for operation in operations], page_size),
            HybridIndices.joined([operation.host for operation in operations], page_size),
            [node for operation in operations for node in operation.node_ids],
            min(operation.priority for operation in operations),
            [flight for operation in operations for flight in operation.flights],
        )

    def started(self, copy: Done) -> None:
        """It is on its way."""
        for flight in self.flights:
            flight.started(copy)

    def over(self) -> bool:
        """Whether all of it has been copied."""
        return all(flight.query() for flight in self.flights)
