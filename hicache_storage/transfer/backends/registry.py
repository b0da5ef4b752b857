"""I/O backends: implementations of the copies of a transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.backends.direct import DirectCopies
from hicache_storage.transfer.backends.gathered import GatheredCopies
from hicache_storage.transfer.backends.mapped import MappedCopies
from hicache_storage.transfer.backends.staging import StagedPair
from hicache_storage.transfer.pages import LaidOutPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.regions.runs import PageMoves
    from hicache_storage.transfer.streams import Device, Stream

Backend = Literal["direct", "kernel", "mapped"]
BACKENDS: Final = ("direct", "kernel", "mapped")
STAGING_BYTES: Final = 32 << 20
"""Length of each staging buffer, in bytes.

`kernel` has two for each direction, `mapped` one. None is longer than its pool needs.
"""


class PageCopies(Protocol):
    """An I/O backend: enqueues the copies of one pool's pages.

    Called by one thread at a time; nothing is waited for.

    A backend may use streams of its own. They begin behind what `stream` holds when it is called,
    and `stream` waits for them, so that an event recorded on it afterwards stands for everything.
    It is that of the direction, which the backend was made with.
    """

    def write_back(self, stream: Stream, moves: PageMoves) -> None:
        """Enqueue the copies of all layers from the device to the host."""
        ...

    def load(self, stream: Stream, moves: PageMoves) -> Callable[[int], None]:
        """Prepare the copies from the host to the device.

        What is returned enqueues those of one layer.
        """
        ...


def page_copies(
    backend: Backend,
    device: Device,
    device_pages: LayeredPages,
    host_pages: LayeredPages,
    staging_bytes: int,
    streams: tuple[Stream, Stream],
) -> PageCopies:
    """The backend of that name, for one pair of pools; takes its staging memory at once.

    Args:
        streams: of write-backs and of loads.

    Raises:
        InvalidTransferError: no backend has that name, or it does not support the layout of these
            host pages.
        InvalidPoolError: it needs host memory that kernels can reach, and this is not; or the
            device has no memory for staging.
    """
    if backend not in BACKENDS:
        raise InvalidTransferError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "direct":
        return DirectCopies(device_pages, host_pages)
    # Both other backends need the layout: one makes buffers like it, the other maps its memory.
    if not isinstance(host_pages, LaidOutPages):
        raise InvalidTransferError(
            f"the backend {backend!r} takes HostPages, not {type(host_pages).__name__}; pass "
            "'direct'"
        )
    copies = GatheredCopies if backend == "kernel" else MappedCopies
    return copies(StagedPair(device, device_pages, host_pages, staging_bytes, streams))
