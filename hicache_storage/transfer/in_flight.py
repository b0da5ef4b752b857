"""Copies in flight: the memory that they use, and their end after a failure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hicache_storage.transfer.streams import StreamFailedError, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache_storage.transfer.streams import Device, Event, Stream


def wait_for_all(streams: Iterable[Stream]) -> None:
    """Block the calling thread until everything enqueued so far is over.

    Raises:
        StreamFailedError: an operation failed; the others are over all the same.
    """
    with contextlib.ExitStack() as waiting:
        # It calls all callbacks even if one raises.
        for stream in streams:
            waiting.callback(stream.synchronize)


def settle(streams: Iterable[Stream], used: object) -> None:
    """Do the same, and ignore failures, before memory that copies use is let go of."""
    with contextlib.suppress(StreamFailedError):
        wait_for_all(streams)


class Unknown:
    """The end of copies about which a failed stream tells nothing: it never comes."""

    def query(self) -> bool:
        return False


def end_after_failure(
    device: Device, stream: Stream, join: Callable[[Stream], None]
) -> Event | Unknown | None:
    """Return the event of the copies that were enqueued before a failure; None if they have ended.

    Blocks only where no event can be recorded.

    Args:
        join: lets the stream wait for others that copies were enqueued on.
    """
    with contextlib.suppress(Exception):
        # First without waiting. A stream that refuses to record may still let the thread wait for
        # it; one that refuses both tells nothing any more.
        join(stream)
        return recorded(device, stream)
    with contextlib.suppress(Exception):
        stream.synchronize()
        return None
    return Unknown()
