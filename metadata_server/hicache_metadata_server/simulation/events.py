"""What happens in a cluster, as the lines of a trace."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class Op(StrEnum):
    """What an engine does, or what happens to it."""

    PROMPT = "prompt"
    """Look the pages of a prompt up, read those that are there from the first on, store the
    others."""
    LOOKUP = "lookup"
    """Ask whether pages are there."""
    STORE = "store"
    """Store pages."""
    DELETE = "delete"
    ENGINE_FAILS = "engine_fails"
    """It forgets its local cache, and what it was about to commit; it is there again at once."""
    SERVER_FAILS = "server_fails"
    """Nobody answers for `seconds`; what was committed is there afterwards."""


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line: a JSON object."""

    time: Annotated[float, Meta(ge=0)]
    """Seconds since any instant; never less than in the line before."""
    op: Op
    engine: Annotated[int, Meta(ge=0)] = 0
    rank: Annotated[int, Meta(ge=0)] | None = None
    """None for all ranks of the engine, which then do the same, each in a scope of its own."""
    keys: list[Annotated[str, Meta(min_length=1)]] = []
    """Pages in the order of their chain."""
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class TraceError(ValueError):
    """A line is no event."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(TraceEvent)


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """The events of a file, read as they are needed.

    Raises:
        TraceError: a line is no event, or earlier than the one before.
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
            if event.time < last:
                raise TraceError(f"{path}, line {number}: time {event.time} is before {last}")
            last = event.time
            yield event


def written(events: Iterable[TraceEvent], path: Path) -> Iterator[TraceEvent]:
    """The same events, each written to a file as it goes by.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        for event in events:
            file.write(_ENCODER.encode(event) + b"\n")
            yield event
