"""Pages in shards of KV heads: the parts of a rank's pages that are stored as objects of their own.

A shard has the bytes that a page would have if the pool held only the shard's heads. So they do not
depend on the number of heads that a rank holds, and with it on the TP size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hicache_storage.pools.access import PageAccess, StagedAccess
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import PageGeometry


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
    # One shard is the whole page, in any layout.
    if count == 1:
        return [access]
    kind = ContiguousShard if max(rows) == 1 else GatheredShard
    return [kind(access, shard, number) for number in range(count)]


class ContiguousShard(PageAccess):
    """Lends a shard that is one run of bytes in each component."""

    def __init__(self, pages: PageAccess, geometry: PageGeometry, number: int) -> None:
        self.geometry = geometry
        self._pages = pages
        self._runs = [
            slice(number * length, (number + 1) * length) for length in geometry.component_bytes
        ]

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        runs, pages = self._runs, self._pages.sources(first_slots)
        return [[view[run] for view, run in zip(page, runs, strict=True)] for page in pages]


class GatheredShard(StagedAccess):
    """Copies a shard out of the rows of a page, and back into them."""

    SPARE_BYTES: ClassVar[int] = 64 << 20

    def __init__(self, pages: PageAccess, geometry: PageGeometry, number: int) -> None:
        super().__init__(geometry)
        self._pages = pages
        self._number = number

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        pages = self._pages.sources(first_slots)
        shards = [self._new_buffers() for _ in pages]
        self._copy(pages, shards, gathers=True)
        return shards

    def _copy_in(self, first_slots: Sequence[int], pages: Sequence[list[memoryview]]) -> None:
        self._copy(self._pages.targets(first_slots), pages, gathers=False)

    def _copy(
        self,
        pages: Sequence[list[memoryview]],
        shards: Sequence[list[memoryview]],
        *,
        gathers: bool,
    ) -> None:
        # Imported here: a pool that lends its pages needs no torch.
        from hicache_storage.pools.memory import copy_columns

        for page, shard in zip(pages, shards, strict=True):
            for whole, part, rows in zip(page, shard, self.geometry.head_rows, strict=True):
                copy_columns(whole, part, rows, self._number, gathers=gathers)

    def _new_buffers(self) -> list[memoryview]:
        return [memoryview(bytearray(length)) for length in self.geometry.component_bytes]
