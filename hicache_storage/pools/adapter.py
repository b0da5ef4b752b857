"""From a registered host pool, the SDK's or an engine's, to its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hicache_storage.pools.access import PageAccess, check_components, check_size, end_pages
from hicache_storage.spec import HostPool, InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAT_METHODS = ("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page")


def page_access(host_pool: object) -> PageAccess:
    """Find the shortest way to a host pool's pages.

    - A `HostPool` lends its own memory.
    - So does an engine's pool that tells addresses in host memory (`get_page_buffer_meta`).
    - Any other that copies flat pages (`get_data_page`, `get_dummy_flat_data_page`,
      `set_from_flat_data_page`) is served through buffers in between, pools in device memory
      included.

    Nothing is written to the pool. Pools of one layout but of different components never share
    pages: the components are part of the geometry.

    Raises:
        InvalidPoolError: the pool offers none of these, has no memory of its own, or contradicts
            itself.
    """
    where = type(host_pool).__name__
    if isinstance(host_pool, HostPool):
        return LentPages(host_pool, where)
    # SGLang's logical anchors (DeepSeek-V4) have the attribute, with None in it; many pools do not
    # have it at all.
    if getattr(host_pool, "kv_buffer", False) is None:
        raise InvalidPoolError(
            f"{where} has no memory of its own (kv_buffer is None): its pages are bookkeeping for "
            "other pools. Register those, not this one"
        )
    return _engine_pages(host_pool, where)


class LentPages(PageAccess):
    """Pages of a pool that lends its own memory."""

    def __init__(self, pool: HostPool, where: str) -> None:
        self._pool = pool
        self.geometry = pool.geometry
        if not isinstance(cast("object", self.geometry), PageGeometry):
            raise InvalidPoolError(
                f"{where}.geometry must be a PageGeometry, got {self.geometry!r}"
            )
        check_size(self.geometry.size, self.geometry.page_size, f"{where}.")
        check_components(self.geometry.component_bytes, where)
        # The first and the last page: a pool that is shorter than it declares is refused here, and
        # does not fail in a transfer.
        for page in pool.page_buffers(end_pages(self.geometry)):
            lengths = tuple(len(buffer) for buffer in page if _is_writable_run(buffer))
            if len(lengths) != len(page) or lengths != self.geometry.component_bytes:
                raise InvalidPoolError(
                    f"{where}.page_buffers must give writable, contiguous byte views as long as "
                    f"geometry.component_bytes {self.geometry.component_bytes}, got {page}"
                )

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self._pool.page_buffers(first_slots)


def _is_writable_run(buffer: memoryview) -> bool:
    return buffer.ndim == 1 and buffer.itemsize == 1 and buffer.contiguous and not buffer.readonly


def _engine_pages(host_pool: object, where: str) -> PageAccess:
    missing = [name for name in FLAT_METHODS if not hasattr(host_pool, name)]
    has_addresses = hasattr(host_pool, "get_page_buffer_meta")
    if missing and not has_addresses:
        raise InvalidPoolError(
            f"{where} cannot be served: it needs geometry and page_buffers, or "
            f"get_page_buffer_meta, or the flat pages of which it lacks {', '.join(missing)}"
        )
    # It needs torch, which an engine's pool has long loaded; a program without one stays free of it.
    from hicache_storage.pools.engine import AddressedPages, NoAddressesError, StagedPages, describe

    geometry = describe(host_pool, where)
    if has_addresses:
        try:
            return AddressedPages(host_pool, geometry, where)
        # Not an error yet: the pool's pages can still be copied, if it has the methods for that.
        except NoAddressesError as error:
            if missing:
                raise InvalidPoolError(
                    f"{where} cannot be served: {error}, and it lacks the flat pages "
                    f"({', '.join(missing)})"
                ) from error
    return StagedPages(host_pool, geometry, where)
