"""Pages of an engine's pool that tells where they lie in host memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from hicache_storage.pools.access import PageAccess
from hicache_storage.pools.engine import check_components, end_pages, is_on_device
from hicache_storage.pools.memory import in_host_memory, span_view
from hicache_storage.pools.shards import layout_rows
from hicache_storage.spec import InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools.engine import EnginePool


class NoAddressesError(Exception):
    """The pool has pages but no addresses in host memory for them; they can still be copied."""


class AddressedPages(PageAccess):
    """Lends an engine's memory by the addresses that `get_page_buffer_meta` tells.

    The method is called once for each batch.

    The pool is kept alive; that its memory stays where it says is the engine's promise for the
    length of a call.

    Raises:
        NoAddressesError: the pool has none to tell, or they are in device memory.
        InvalidPoolError: it has no memory of its own, or its answers contradict each other.
    """

    def __init__(self, pool: EnginePool, geometry: PageGeometry, where: str) -> None:
        self._pool = pool
        self._where = where
        self._offsets = torch.arange(geometry.page_size)
        slots = end_pages(geometry)
        addresses, lengths = self._first_answer(slots)
        components = lengths[: len(lengths) // len(slots)]
        self.geometry = replace(geometry, component_bytes=tuple(components))
        check_components(self.geometry.component_bytes, where)
        if len(addresses) != len(lengths) or lengths != components * len(slots):
            raise InvalidPoolError(
                f"{where}.get_page_buffer_meta must tell as many addresses as lengths, and the "
                f"same lengths for each page; for {len(slots)} pages it returned {len(addresses)} "
                f"addresses and the lengths {lengths}"
            )
        ranges = sorted(zip(addresses, lengths, strict=True))
        if any(start + length > after for (start, length), (after, _) in pairwise(ranges)):
            raise InvalidPoolError(
                f"{where}.get_page_buffer_meta tells overlapping components for different pages"
            )
        # Both are asked: not every pool tells where it lies, and device addresses look like any
        # others.
        if is_on_device(pool) or not in_host_memory(ranges):
            raise NoAddressesError("the addresses of its pages are not host memory")
        self._span = _span_over(addresses, max(components))
        self.geometry = _with_heads(self.geometry, pool, addresses[: len(components)])

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._lent(first_slots)

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._lent(first_slots)

    def _lent(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        if not first_slots:
            return []
        components = self.geometry.component_bytes
        expected = components * len(first_slots)
        # Asked in every call: an engine's pool that compacts itself may move its pages between
        # calls.
        addresses, lengths = self._pool.get_page_buffer_meta(self._indices(first_slots)) or ((), ())
        if len(addresses) != len(expected) or tuple(lengths) != expected:
            raise InvalidPoolError(
                f"{self._where}.get_page_buffer_meta returned {components} bytes for a page when "
                f"it was registered, and now {len(addresses)} components for {len(first_slots)} "
                "pages"
            )
        # A local reference: another thread may replace the attribute between the check and the
        # slicing.
        span = self._span
        if min(addresses) < span.start or max(addresses) > span.last:
            self._span = span = _span_over(addresses, max(components))
        start, _, view = span
        views = [
            view[at - start : at - start + length]
            for at, length in zip(addresses, lengths, strict=True)
        ]
        return [views[at : at + len(components)] for at in range(0, len(views), len(components))]

    def _indices(self, first_slots: Sequence[int]) -> torch.Tensor:
        return (self._offsets.new_tensor(first_slots).unsqueeze(1) + self._offsets).view(-1)

    def _first_answer(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        try:
            answer = self._pool.get_page_buffer_meta(self._indices(slots))
            addresses, lengths = (list(part or ()) for part in answer or ((), ()))
        except (AssertionError, NotImplementedError, ValueError) as error:
            # SGLang's pools answer so where a layout, or a kind of state, has no addresses to tell.
            raise NoAddressesError(
                f"get_page_buffer_meta says {str(error) or repr(error)!r}"
            ) from error
        except Exception as error:
            raise InvalidPoolError(
                f"{self._where}.get_page_buffer_meta failed: {error!r}"
            ) from error
        if not addresses and not lengths:
            raise InvalidPoolError(
                f"{self._where} has no memory of its own (get_page_buffer_meta tells nothing): "
                "its pages are bookkeeping for other pools. Register those, not this one"
            )
        return addresses, lengths


def _with_heads(geometry: PageGeometry, pool: object, addresses: Sequence[int]) -> PageGeometry:
    """Add the KV heads, where the pool's attributes account for every byte of a page.

    Args:
        geometry: of the pool.
        pool: an engine's.
        addresses: of the components of its first page.
    """
    heads, layers, head_dim, v_head_dim = (
        getattr(pool, name, None) for name in ("head_num", "layer_num", "head_dim", "v_head_dim")
    )
    dtype = getattr(pool, "dtype", None)
    if not (
        isinstance(heads, int)
        and isinstance(layers, int)
        and isinstance(head_dim, int)
        and isinstance(dtype, torch.dtype)
    ):
        return geometry
    page_size = getattr(pool, "page_size", None)
    rows = layout_rows(geometry.layout, geometry.page_size, layers)
    bytes_of_a_head = rows * dtype.itemsize
    if geometry.layout == "page_head":
        bytes_of_a_head *= geometry.page_size * layers
    lengths = {
        heads * width * bytes_of_a_head
        for width in (head_dim, v_head_dim)
        if isinstance(width, int)
    }
    if not rows or page_size != geometry.page_size or set(geometry.component_bytes) != lengths:
        return geometry
    if not _is_split_alike(pool, heads, geometry, addresses):
        return geometry
    return replace(geometry, head_num=heads, head_rows=(rows,) * len(geometry.component_bytes))


def _is_split_alike(
    pool: object, heads: int, geometry: PageGeometry, addresses: Sequence[int]
) -> bool:
    """Return False if the engine itself divides a page into heads in another way."""
    split = getattr(pool, "get_split_heads_page_buffer_meta", None)
    if geometry.layout != "page_head" or split is None:
        return True
    try:
        found, _ = split(torch.arange(geometry.page_size), heads)
    except (AssertionError, NotImplementedError):
        return False
    return list(found) == [
        address + head * length // heads
        for head in range(heads)
        for address, length in zip(addresses, geometry.component_bytes, strict=True)
    ]


class _Span(NamedTuple):
    """One view from the lowest to the highest address in use.

    Slicing it is twice as fast as a view for each address.
    """

    start: int
    last: int
    view: memoryview


def _span_over(addresses: Sequence[int], size: int) -> _Span:
    start, last = min(addresses), max(addresses)
    return _Span(start, last, span_view(start, last - start + size))
