"""Queues of copies between device and host: launched once a step, ended on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from hicache_storage.hybrid.pools import HybridIndices
from hicache_storage.transfer import Acknowledgement, Indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.ranks import RankGroup


CopyT = TypeVar("CopyT", bound=Acknowledgement)


@dataclass(slots=True, eq=False)
class CacheOperation:
    """A span to be copied in one direction, all pools.

    Its host pages stay reserved until it is launched; after that the copies' fences keep them.
    """

    host: HybridIndices
    node_id: int
    """Returned when the copy has ended."""
    device: HybridIndices = field(default_factory=HybridIndices)
    is_queued: bool = True

    def query(self) -> bool:
        """Return whether the operation was launched or dropped."""
        return not self.is_queued


class CopyQueue(Generic[CopyT]):
    """Operations of one direction: queued, launched together, and ended on every rank.

    Args:
        copy: enqueues the copies of all pools, given by their names.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        rank_group: RankGroup,
        copy: Callable[[dict[str, Indices]], CopyT],
    ) -> None:
        self._group = group
        self._rank_group = rank_group
        self._copy = copy
        self.queued: list[CacheOperation] = []
        self.running: list[tuple[CopyT, list[int]]] = []
        """Launched copies and their nodes."""

    def launch(self) -> int:
        """Launch the queued operations as one copy; returns the number of tokens.

        Raises:
            InvalidTransferError: a slot is out of range; nothing is copied, and all have ended.
        """
        # Before the copy, which may raise: a span that was refused must not be launched again.
        operations, self.queued = self.queued, []
        if not operations:
            return 0
        devices, hosts = zip(*((each.device, each.host) for each in operations), strict=True)
        pages: dict[str, Indices] = {}
        for name in self._group.entries:
            device, host = (
                torch.cat([self._group.slots(span, name) for span in spans])
                for spans in (devices, hosts)
            )
            # A span may have no slots of a pool, and be a state alone.
            if device.numel():
                pages[name] = Indices(device, host)
        try:
            copy = self._copy(pages)
        finally:
            for operation in operations:
                operation.is_queued = False
        self.running.append((copy, [operation.node_id for operation in operations]))
        return sum(device.tokens for device in devices)

    def completed(self) -> list[int]:
        """Return the nodes of copies that have ended on every rank, each once.

        A collective while there are any.

        Raises:
            StreamFailedError: a copy of this rank failed; it votes that the copy has not ended.
        """
        # The same copies run on every rank, in the same order, so the test is the same on all.
        if not self.running:
            return []
        votes, error = list[int](), None
        for copy, _ in self.running:
            try:
                votes.append(int(copy.done()))
            except Exception as failure:  # noqa: BLE001 - raised below, after the collective that the others wait for
                votes.append(0)
                error = failure
        agreed = list(zip(self.running, self._rank_group.all_reduce_min(votes), strict=True))
        self.running = [running for running, has_ended in agreed if not has_ended]
        if error is not None:
            raise error
        return [node for (_, nodes), has_ended in agreed if has_ended for node in nodes]

    def reset(self) -> None:
        """Drop all operations; the host pages of running ones stay reserved until they end."""
        for operation in self.queued:
            operation.is_queued = False
        self.queued = []
        self.running = []
