"""Exceptions and damage that were answered as misses, and stacks of threads that are inside the driver."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_OWN: Final = frozenset({"hicache_storage", "hicache_conformance"})
_CALLERS: Final = (
    "hicache_storage.objects.storage",
    "hicache_storage.objects.faults",
    "hicache_conformance.interfaces.",
)
"""Prefixes of the names of modules that call drivers."""
_OF_THE_STORE: Final = (
    "StorageUnavailableError",
    "StorageRefusedError",
    "TimeoutError",
    "ConnectionError",
)
"""Ends of the names of errors by which the client of a store says that it does not serve."""
_MAX_TEXT: Final = 300
_MAX_CHAIN: Final = 4
_MAX_TRACEBACK: Final = 4_000
_MAX_STACKS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What the SDK or an adapter answered as a miss, or an exception that ended a call."""

    error: str
    """Type and message, in one line."""
    place: str
    """File, line and function of the driver in which it was raised or passed; empty if it never
    was in the driver."""
    traceback: str
    """The driver's frames first, the innermost of them at the top; then the other frames."""
    expected: bool
    """A store that is down, slow, full or damaged causes this; a bug causes others."""
    injected: bool
    """The suite raised it, in the place of the driver's store."""

    @property
    def defect(self) -> str:
        """Equal for causes that one mistake in the driver explains."""
        # What follows the colon is of one call: an exception's message, the lengths of a damaged page.
        kind = self.error.partition(":")[0]
        if self.place:
            return f"{kind} at {self.place}"
        return self.error if self.traceback else kind

    def __str__(self) -> str:
        return f"{self.error} ({self.place})" if self.place else self.error


def cause_of(error: BaseException) -> Cause:
    """Describe an exception; nothing of its frames is kept alive."""
    chain = list(_chain(error))
    stacks = [list(traceback.walk_tb(each.__traceback__)) for each in chain]
    raised = stacks[0]
    origin = _module(raised[-1][0]) if raised else ""
    # The SDK raises some errors from the driver's: the driver's frames are in those.
    frames = next(
        (found for found in stacks if any(_is_foreign(frame) for frame, _ in found)), raised
    )
    package = next((_package(frame) for frame, _ in frames if _is_foreign(frame)), "")
    mine = [(frame, line) for frame, line in frames if package and _package(frame) == package]
    others = [(frame, line) for frame, line in frames if (frame, line) not in mine]
    text = " ".join(str(error).split())
    lines = [
        *_lines([*reversed(mine), *reversed(others)]),
        "".join(traceback.format_exception_only(error)).rstrip(),
    ]
    lines += [f"  from {_name(link)}" for link in chain[1:]]
    return Cause(
        # What the message has of the cause anyway is not repeated.
        error=", from ".join(
            [_name(error), *(_name(link) for link in chain[1:] if str(link) not in text)]
        ),
        place=_place(*mine[-1]) if mine else "",
        traceback="\n".join(lines)[:_MAX_TRACEBACK],
        # By name: `StorageUnavailableError` and its kin, and the errors of clients of a store.
        expected=isinstance(error, OSError)
        or any(kind.__name__.endswith(_OF_THE_STORE) for kind in type(error).__mro__),
        # Adapters raise what an engine would raise about the driver's answer.
        injected=origin.startswith("hicache_conformance.") and not origin.startswith(_CALLERS),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, the one that it was raised from, and so on."""
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _name(error: BaseException) -> str:
    """Type and message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MAX_TEXT]}" if text else type(error).__name__


def damage(defect: str) -> Cause:
    """Describe a page that a read found damaged."""
    return Cause(
        error=f"a damaged page, {defect}", place="", traceback="", expected=True, injected=False
    )


def stacks_in_driver() -> str:
    """Stacks of the other threads that are inside a call of the driver, innermost frame first.

    Of threads at the same place one is shown. Empty if there is none.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {
        "\n".join(_lines([(frame, frame.f_lineno) for frame in frames])): names.get(ident, ident)
        for ident, frames in _threads_in_driver()
    }
    shown = [f"thread {name!r}:\n{stack}" for stack, name in found.items()]
    return "\n".join(shown[:_MAX_STACKS])


def places_in_driver() -> list[str]:
    """File, line and function of the driver, of each other thread that is inside a call of it."""
    places = list[str]()
    for _, frames in _threads_in_driver():
        # The outermost one is the driver's; further in there may be libraries that it calls.
        entered = next(frame for frame in reversed(frames) if _is_foreign(frame))
        inner = next(frame for frame in frames if _package(frame) == _package(entered))
        places.append(_place(inner, inner.f_lineno))
    return places


def _threads_in_driver() -> Iterator[tuple[int, list[FrameType]]]:
    """The other threads inside a call of the driver, with their frames down to its caller's."""
    for ident, top in _current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = [frame for frame, _ in traceback.walk_stack(top)]
        called = next(
            (index for index, frame in enumerate(frames) if _module(frame).startswith(_CALLERS)), 0
        )
        # Threads that wait for work have no frame of the driver above the caller's.
        if any(map(_is_foreign, frames[:called])):
            yield ident, frames[: called + 1]


def _place(frame: FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"


def _current_frames() -> dict[int, FrameType]:
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented in spite of its name


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _is_foreign(frame: FrameType) -> bool:
    package = _package(frame)
    return package not in _OWN and package not in sys.stdlib_module_names


def _lines(frames: list[tuple[FrameType, int]]) -> list[str]:
    return "".join(traceback.StackSummary.extract(iter(frames)).format()).rstrip().splitlines()
