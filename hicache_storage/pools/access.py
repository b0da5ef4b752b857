"""Uniform access to the pages of all kinds of host pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import PageGeometry


class PageAccess(ABC):
    """A registered pool, seen by a storage.

    Pages are given by their first slot; the caller has checked that slots are aligned and in range.
    A page is its components as byte views, in the order and with the lengths of
    `geometry.component_bytes`.
    """

    geometry: PageGeometry

    stages: ClassVar[bool] = False
    """True if `targets` makes a buffer for each page.

    It is then asked page by page, once a page is known to be there (rule GET-6).
    """

    @abstractmethod
    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Buffers to store the pages from; valid until the call that asked for them returns."""

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Writable buffers to read the pages into.

        The pool's own memory, which `sources` lends, or staging for `deliver`.
        """
        return self.sources(first_slots)

    def deliver(  # noqa: B027 - pools that lend their own memory have nothing left to do
        self, first_slots: Sequence[int], targets: Sequence[list[memoryview]]
    ) -> None:
        """Bring verified pages from `targets` into the pool. Only of a pool that `stages`.

        The buffers are used again: those of a page that was not read whole are not passed, since a
        hung read may still write into them.
        """


class StagedAccess(PageAccess):
    """Pages that are read into buffers, and copied into the pool from there."""

    stages: ClassVar[bool] = True

    SPARE_BYTES: ClassVar[int]
    """Limit of the memory that the buffers keep between calls."""

    def __init__(self, geometry: PageGeometry) -> None:
        self.geometry = geometry
        # Shared by all threads; appending to a deque and popping from it are atomic.
        self._spare = deque[list[memoryview]](
            maxlen=max(1, self.SPARE_BYTES // geometry.page_bytes)
        )

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [self._buffers() for _ in first_slots]

    def deliver(self, first_slots: Sequence[int], targets: Sequence[list[memoryview]]) -> None:
        if first_slots:
            self._copy_in(first_slots, targets)
            self._spare.extend(targets)

    def _buffers(self) -> list[memoryview]:
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_buffers()

    @abstractmethod
    def _new_buffers(self) -> list[memoryview]:
        """Memory for the components of a page."""

    @abstractmethod
    def _copy_in(self, first_slots: Sequence[int], pages: Sequence[list[memoryview]]) -> None:
        """Copy pages from their buffers into the pool."""


def check_size(size: int, page_size: int, where: str = "") -> None:
    """Refuse a pool that is not a whole number of pages.

    Raises:
        InvalidPoolError: the message begins with `where`.
    """
    if page_size < 1 or size < 1 or size % page_size:
        raise InvalidPoolError(
            f"{where}size must be a positive multiple of page_size, got {size} and {page_size}"
        )


def check_components(component_bytes: Sequence[int], where: str) -> None:
    """Refuse a page without bytes, or with a component without.

    Raises:
        InvalidPoolError: the message begins with `where`.
    """
    if not component_bytes or min(component_bytes) < 1:
        raise InvalidPoolError(
            f"{where}: a page's components must have at least 1 byte each, got {component_bytes}"
        )


def end_pages(geometry: PageGeometry) -> list[int]:
    """First slots of a pool's first and last page."""
    return sorted({0, geometry.size - geometry.page_size})
