"""Copies in flight: ownership of their memory, and the event of their end after a failure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hicache_storage.transfer.streams import StreamFailedError, recorded

if TYPE_CHECKING:
    from hicache_storage.transfer.streams import Device, Event, Stream


class CopiesInFlight:
    """The last copy of each direction, and the memory that copies use.

    The memory must not go before them.

    CUDA allows memory to be unlocked and unmapped under a copy, which then reads or writes memory
    of another owner.

    Args:
        used: what has the memory.
    """

    def __init__(self, *used: object) -> None:
        self._used = used
        self._last: dict[str, Event] = {}

    def note(self, direction: str, until: Event) -> None:
        """The copies of a direction enqueued so far are over when this event comes."""
        self._last[direction] = until

    def wait(self) -> None:
        """Block the calling thread until all copies are over.

        Raises:
            StreamFailedError: one of them failed; the others are over all the same.
        """
        # It calls all callbacks even if one raises: a failed direction does not keep the other from
        # being waited for.
        with contextlib.ExitStack() as waiting:
            for event in self._last.values():
                waiting.callback(event.synchronize)
            self._last = {}

    def settle(self) -> None:
        """Do the same, and ignore failures."""
        with contextlib.suppress(StreamFailedError):
            self.wait()


class Unknown:
    """The end of copies about which a failed stream tells nothing: it never comes."""

    def query(self) -> bool:
        return False


def end_after_failure(device: Device, stream: Stream) -> Event | Unknown | None:
    """Return the event of the copies that were enqueued before a failure; None if they have ended.

    Blocks only where no event can be recorded.
    """
    with contextlib.suppress(Exception):
        # First without waiting. A stream that refuses to record may still let the thread wait for
        # it; one that refuses both tells nothing any more.
        return recorded(device, stream)
    with contextlib.suppress(Exception):
        stream.synchronize()
        return None
    return Unknown()
