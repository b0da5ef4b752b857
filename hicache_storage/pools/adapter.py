"""From a registered host pool, of the SDK or of an engine, to its pages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, cast

from hicache_storage.pools.access import PageAccess
from hicache_storage.spec import HostPool, InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

FLAT_METHODS = ("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page")


class EnginePool(Protocol):
    """What an engine's host pool may offer, under SGLang's names; `page_access` finds out what there is."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[Sequence[int], Sequence[int]] | None:
        """Addresses and lengths in bytes of the components of all pages in `indices`."""
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page that begins at slot `index`, as a flat tensor."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Any tensor of a flat page's length, element type and device."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy `data_page` into the page that begins at slot `index`."""
        ...


def page_access(host_pool: object) -> PageAccess:
    """Find the best way to a host pool's pages.

    - A `HostPool` lends its own memory.
    - So does an engine's pool that tells addresses (`get_page_buffer_meta`) in host memory.
    - Any other that copies flat pages (`get_data_page`, `get_dummy_flat_data_page`, `set_from_flat_data_page`) is
      served through buffers in between; so are pools in device memory.

    The first and the last page are looked at, none is read or written.

    Raises:
        InvalidPoolError: the pool offers none of these, has no memory of its own, or contradicts itself.
    """
    if isinstance(host_pool, HostPool):
        return LentPages(host_pool)
    where = type(host_pool).__name__
    if getattr(host_pool, "kv_buffer", host_pool) is None:
        raise InvalidPoolError(
            f"{where} has no memory of its own (kv_buffer is None): its pages are bookkeeping for other pools. "
            "Register those, not this one"
        )
    tells_addresses = hasattr(host_pool, "get_page_buffer_meta")
    missing = [name for name in FLAT_METHODS if not hasattr(host_pool, name)]
    if missing and not tells_addresses:
        raise InvalidPoolError(
            f"{where} cannot be served: it needs geometry and page_buffers, or get_page_buffer_meta, or flat pages "
            f"(missing: {', '.join(missing)})"
        )
    return _engine_pages(cast("EnginePool", host_pool), where, tells_addresses=tells_addresses, copies_pages=not missing)


class LentPages(PageAccess):
    """Pages of a pool that lends its own memory."""

    def __init__(self, pool: HostPool) -> None:
        self.geometry = pool.geometry
        self._pool = pool
        where = type(pool).__name__
        if not isinstance(self.geometry, PageGeometry):
            raise InvalidPoolError(f"{where}.geometry must be a PageGeometry, got {self.geometry!r}")
        _check_geometry(self.geometry, where)
        for buffers in pool.page_buffers(end_pages(self.geometry.size, self.geometry.page_size)):
            lengths = tuple(len(buffer) if _is_byte_run(buffer) else None for buffer in buffers)
            if lengths != self.geometry.component_bytes:
                raise InvalidPoolError(
                    f"{where}.page_buffers must give writable one-dimensional byte views with the lengths of "
                    f"geometry.component_bytes {self.geometry.component_bytes}, got {lengths}"
                )

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._pool.page_buffers(first_slots)

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._pool.page_buffers(first_slots)


def end_pages(size: int, page_size: int) -> list[int]:
    """First slots of a pool's first and last page."""
    return sorted({0, size - page_size})


def _engine_pages(pool: EnginePool, where: str, *, tells_addresses: bool, copies_pages: bool) -> PageAccess:
    # An engine's pool means that torch is loaded; a program that has none stays without it.
    from hicache_storage.pools.addressed import AddressedPages
    from hicache_storage.pools.staged import StagedPages

    geometry = _described(pool, where)
    refusal: Exception | None = None
    if tells_addresses:
        try:
            pages = AddressedPages(pool, geometry)
        except (ValueError, NotImplementedError, AssertionError) as error:
            # SGLang's pools say so where a layout or a kind of state has no addresses to tell.
            refusal = error
        else:
            return pages
    ...
