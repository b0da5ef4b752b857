"""Queues of copies between device and host: launched once a step, ended on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hicache_storage.hybrid.pools import HybridIndices
from hicache_storage.transfer import Indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.transfer import LayerCounter, Stream


class SupportsDone(Protocol):
    """An acknowledgement or a layer counter of a copy."""

    def done(self) -> bool:
        """Return whether the copy has ended; does not block."""
        ...


CopyT = TypeVar("CopyT", bound=SupportsDone)


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


@dataclass(slots=True, eq=False)
class CacheOperation:
    """A span to be copied in one direction, all pools.

    Its host pages stay reserved until the copy has ended.
    """

    host: HybridIndices
    node_ids: Sequence[int]
    """Ids of the cache nodes that it copies; returned when the copy has ended."""
    priority: int
    """Smaller is copied earlier within a step."""
    device: HybridIndices = field(default_factory=HybridIndices.empty)
    copy: SupportsDone | None = None
    """The copy, once it is launched."""

    def query(self) -> bool:
        """Return whether the copy was launched and has ended; does not block.

        Raises:
            StreamFailedError: the copy failed.
        """
        return self.copy is not None and self.copy.done()

    def drop(self) -> None:
        """End the operation without a copy."""
        self.copy = LoadProgress()


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
        self._launches = 0
        self.queued: list[CacheOperation] = []
        self.running: dict[int, tuple[CopyT, list[int]]] = {}
        """Launched copies and their nodes, by their numbers from 1 on."""

    def launch(self) -> int:
        """Launch the queued operations as one copy; returns the number of tokens.

        Raises:
            InvalidTransferError: a slot is out of range; nothing is copied, and all have ended.
        """
        # A stable sort: within a priority the order of the calls is kept, which is the same on
        # every rank.
        operations = sorted(self.queued, key=lambda operation: operation.priority)
        # Before the copy, which may raise: a span that was refused must not be launched again.
        self.queued = []
        if not operations:
            return 0
        page_size = self._group.page_size
        spans = [
            HybridIndices.concat([operation.device for operation in operations], page_size),
            HybridIndices.concat([operation.host for operation in operations], page_size),
        ]
        pages: dict[str, Indices] = {}
        for name in self._group.entries:
            device, host = (self._group.slots(span, name) for span in spans)
            # A span may have no slots of a pool, and be a state alone.
            if device is not None and host is not None and device.numel():
                pages[name] = Indices(device, host)
        try:
            copy = self._copy(pages)
        except BaseException:
            for operation in operations:
                operation.drop()
            raise
        for operation in operations:
            operation.copy = copy
        self._launches += 1
        nodes = [node for operation in operations for node in operation.node_ids]
        self.running[self._launches] = copy, nodes
        return spans[0].anchor.numel()

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
        for copy, _ in self.running.values():
            try:
                votes.append(int(copy.done()))
            except Exception as failure:  # noqa: BLE001 - raised below, after the collective that the others wait for
                votes.append(0)
                error = failure
        agreed = self._rank_group.all_reduce_min(votes)
        ended = [number for number, vote in zip(self.running, agreed, strict=True) if vote]
        nodes = [node for number in ended for node in self.running.pop(number)[1]]
        if error is not None:
            raise error
        return nodes

    def reset(self) -> None:
        """Drop all operations; the host pages of running ones stay reserved until they end."""
        for operation in self.queued:
            operation.drop()
        self.queued = []
        self.running = {}
