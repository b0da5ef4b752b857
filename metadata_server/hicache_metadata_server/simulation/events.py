"""Events of a cluster, as lines of a trace."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class Op(StrEnum):
    """Operation of an engine, or failure."""

    PROMPT = "prompt"
    """Look up the pages of a prompt, read the found prefix, store the others."""
    LOOKUP = "lookup"
    """Look up pages."""
    STORE = "store"
    """Store pages."""
    DELETE = "delete"
    ENGINE_FAILS = "engine_fails"
    """The engine loses its local cache and its uncommitted writes, and restarts at once."""
    SERVER_FAILS = "server_fails"
    """The server does not answer for `seconds`; committed pages survive."""


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One event: a line with a JSON object."""

    time: Annotated[float, Meta(ge=0)]
    """Seconds since any instant, not decreasing."""
    op: Op
    engine: Annotated[int, Meta(ge=0)] = 0
    rank: Annotated[int, Meta(ge=0)] | None = None
    """Rank; None for all ranks of the engine, which do the same in scopes of their own."""
    keys: list[Annotated[str, Meta(min_length=1)]] = []
    """Keys in the order of their chain."""
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class TraceError(ValueError):
    """A line of a trace is malformed."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(TraceEvent)


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """Read the events of a file lazily.

    Raises:
        TraceError: a line is malformed, or earlier than the one before.
        OSError: the file cannot be read.
    """
    last = 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                event = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            # Time in the service must not go back: a lease that has ended would be held again.
            if event.time < last:
                raise TraceError(f"{path}, line {number}: time {event.time} is before {last}")
            last = event.time
            yield event


def record_trace(events: Iterable[TraceEvent], path: Path) -> Iterator[TraceEvent]:
    """Yield events, and write each of them to a file.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        for event in events:
            file.write(_ENCODER.encode(event) + b"\n")
            yield event
