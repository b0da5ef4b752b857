"""Pages in shards of KV heads: the parts of a rank's pages that are stored as objects of their own.

A shard has the bytes that a page would have if the pool held only the shard's heads. So they do not
depend on the number of heads that a rank holds, and with it on the TP size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hicache_storage.pools.access import PageAccess
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import PageGeometry

SPARE_BYTES = 64 << 20
"""Limit of the memory that the buffers of a shard keep between calls."""


def layout_rows(layout: str, page_size: int, layer_num: int) -> int:
    """Number of rows of KV heads in each component of a page; 0 for a layout that is not known."""
    return {
        "layer_first": page_size,
        "page_first": page_size * layer_num,
        "page_first_direct": page_size * layer_num,
        "page_head": 1,
    }.get(layout, 0)


def head_shards(access: PageAccess, count: int, where: str) -> list[PageAccess]:
    """Divide the pages of a pool into shards, each of equally many consecutive heads.

    Where a page's components have one row (`page_head`), a shard is lent as it lies. Otherwise it is
    copied through buffers. A transfer of the rows in parts would be faster from 4 KiB a row on, as
    was measured, and the row of a head has a few hundred bytes.

    Args:
        access: the pages.
        count: number of shards in them.
        where: name of the pool, for messages.

    Raises:
        InvalidPoolError: the pool does not tell its heads, they cannot be divided, or its pages
            cannot be lent.
    """
    geometry = access.geometry
    heads, rows = geometry.head_num, geometry.head_rows
    if not heads:
        raise InvalidPoolError(
            f"{where} has no KV heads, or does not tell them (head_num and head_rows of its "
            "geometry), so that it cannot be stored in shards of them; name it in "
            "tp_sharded_pools or tp_replicated_pools, or leave out store_tp_size"
        )
    if access.stages:
        raise InvalidPoolError(
            f"{where} only copies whole pages, of which no shard can be read by itself; use a "
            "pool in host memory that tells addresses, or leave out store_tp_size"
        )
    if heads % count:
        raise InvalidPoolError(
            f"{where} has {heads} KV heads on this rank, which {count} shards cannot share; "
            "store_tp_size must divide the number of KV heads"
        )
    lengths = geometry.component_bytes
    if len(rows) != len(lengths) or any(
        number < 1 or length % (number * heads)
        for number, length in zip(rows, lengths, strict=False)
    ):
        raise InvalidPoolError(
            f"{where}.geometry contradicts itself: components of {lengths} bytes cannot have "
            f"{rows} rows of {heads} heads"
        )
    shard = replace(
        geometry,
        component_bytes=tuple(length // count for length in lengths),
        head_num=heads // count,
    )
    kind = ContiguousShard if max(rows) == 1 else GatheredShard
    # One shard is the whole page, in any layout.
    return (
        [ContiguousShard(access, shard, 0)]
        if count == 1
        else [kind(access, shard, number) for number in range(count)]
    )


class _HeadShard(PageAccess):
    def __init__(self, pages: PageAccess, geometry: PageGeometry, number: int) -> None:
        self.geometry = geometry
        self._pages = pages
        self._number = number


class ContiguousShard(_HeadShard):
    """Lends a shard that is one run of bytes in each component."""

    def __init__(self, pages: PageAccess, geometry: PageGeometry, number: int) -> None:
        super().__init__(pages, geometry, number)
        self._runs = [
            slice(number * length, (number + 1) * length) for length in geometry.component_bytes
        ]
        self._whole = geometry.component_bytes == pages.geometry.component_bytes

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._cut(self._pages.sources(first_slots))

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._cut(self._pages.targets(first_slots))

    def _cut(self, pages: list[list[memoryview]]) -> list[list[memoryview]]:
        if self._whole:
            return pages
        runs = self._runs
        return [[view[run] for view, run in zip(page, runs, strict=True)] for page in pages]


class GatheredShard(_HeadShard):
    """Copies a shard out of the rows of a page, and back into them."""

    stages: ClassVar[bool] = True

    def __init__(self, pages: PageAccess, geometry: PageGeometry, number: int) -> None:
        super().__init__(pages, geometry, number)
        # Shared by all threads; appending to a deque and popping from it are atomic.
        self._spare = deque[list[memoryview]](maxlen=max(1, SPARE_BYTES // geometry.page_bytes))

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        shards = list[list[memoryview]]()
        for page in self._pages.sources(first_slots):
            buffers = self._new_buffers()
            self._copy(page, buffers, gathers=True)
            shards.append(buffers)
        return shards

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [self._buffers() for _ in first_slots]

    def deliver(
        self,
        first_slots: Sequence[int],
        targets: Sequence[list[memoryview]],
        delivered: Sequence[bool],
    ) -> None:
        pages = self._pages.targets(first_slots)
        for page, buffers, complete in zip(pages, targets, delivered, strict=True):
            # The buffers of a page that was not delivered are not reused: a hung read may still
            # write into them.
            if complete:
                self._copy(page, buffers, gathers=False)
                self._spare.append(buffers)

    def _copy(
        self, page: Sequence[memoryview], buffers: Sequence[memoryview], *, gathers: bool
    ) -> None:
        # Imported here: a pool that lends its pages needs no torch.
        from hicache_storage.pools.memory import copy_columns

        for whole, part, rows in zip(page, buffers, self.geometry.head_rows, strict=True):
            copy_columns(whole, part, rows, self._number, gathers=gathers)

    def _buffers(self) -> list[memoryview]:
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_buffers()

    def _new_buffers(self) -> list[memoryview]:
        from hicache_storage.pools.memory import byte_view, empty_bytes

        return [byte_view(empty_bytes(length)) for length in self.geometry.component_bytes]
