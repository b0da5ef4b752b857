"""Uniform access to the pages of all kinds of host pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

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

    @abstractmethod
    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Writable buffers to read the pages into.

        The pool's own memory, or staging for `deliver`.
        """

    def deliver(  # noqa: B027 - pools that lend their own memory have nothing left to do
        self,
        first_slots: Sequence[int],
        targets: Sequence[list[memoryview]],
        delivered: Sequence[bool],
    ) -> None:
        """Bring verified pages from `targets` into the pool. Only of a pool that `stages`."""
