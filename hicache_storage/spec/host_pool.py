"""Protocol of host pools: page geometry and page buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Shape of a pool's pages; part of the namespace that its pages are stored under."""

    layout: str
    """Order of the bytes of the components."""
    dtype: str
    """Name of the element type, without the `torch.` prefix."""
    page_size: int
    """Slots per page."""
    size: int
    """Slots in the pool; does not decide about sharing."""
    component_bytes: tuple[int, ...]
    """Length of each component of a page, in bytes, in their fixed order."""
    head_num: int = 0
    """KV heads in a page; 0 for a pool that has none, or does not tell.

    Does not decide about sharing.
    """
    head_rows: tuple[int, ...] = ()
    """Of each component, the number of its rows, where there are KV heads.

    A row has the bytes of each head, one after the other and equally long. `page_head` has one row
    a component.
    """

    @property
    def page_bytes(self) -> int:
        """Length of a page, in bytes."""
        return sum(self.component_bytes)


@runtime_checkable
class HostPool(Protocol):
    """A host pool that lends its memory.

    The SDK's own pools, and any other that offers these two members.
    """

    @property
    def geometry(self) -> PageGeometry: ...

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """For each page, its components as writable byte views of the pool itself.

        Pages are given by their first slots.

        The views stay valid as long as the pool lives. `first_slots` are aligned to the page size
        and in range; the caller has checked them.
        """
        ...
