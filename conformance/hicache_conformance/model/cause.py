"""Exceptions and damage that were answered as misses, and stacks of threads that are inside the driver."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_OWN: Final = frozenset({"hicache_storage", "hicache_conformance"})
_CALLERS: Final = ("hicache_storage.objects.storage", "hicache_conformance.interfaces.")
"""Prefixes of the names of modules that call drivers."""
_MAX_TEXT: Final = 300
_MAX_TRACEBACK: Final = 4_000
_MAX_STACKS: Final = 3
_MAX_FRAMES: Final = 12


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
        return f"{self.error.partition(':')[0]} at {self.place}" if self.place else self.error

    def __str__(self) -> str:
        return f"{self.error} ({self.place})" if self.place else self.error


def cause_of(error: BaseException) -> Cause:
    """Describe an exception; nothing of its frames is kept alive."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    package = next((_package(frame) for frame, _ in frames if _is_foreign(frame)), "")
    mine = [(frame, line) for frame, line in frames if package and _package(frame) == package]
    others = [(frame, line) for frame, line in frames if (frame, line) not in mine]
    inner = traceback.extract_stack(mine[-1][0], 1)[0] if mine else None
    text = " ".join(str(error).split())
    lines = [
        *_lines([*reversed(mine), *reversed(others)]),
        "".join(traceback.format_exception_only(error)).rstrip(),
    ]
    chained = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if chained is not None:
        lines.append(f"  from {type(chained).__name__}: {str(chained)[:_MAX_TEXT]}")
    return Cause(
        error=f"{type(error).__name__}: {text[:_MAX_TEXT]}" if text else type(error).__name__,
        place=f"{Path(inner.filename).name}:{mine[-1][1]} in {inner.name}" if inner else "",
        traceback="\n".join(lines)[:_MAX_TRACEBACK],
        expected=isinstance(error, OSError) or _is_of_the_store(error),
        injected=bool(frames) and _package(frames[-1][0]) == "hicache_conformance",
    )


def damage(defect: str) -> Cause:
    """Describe a page that a read found damaged."""
    return Cause(
        error=f"a damaged page, {defect}", place="", traceback="", expected=True, injected=False
    )


def stack_of(ident: int) -> str:
    """Return the stack of a thread, innermost frame first; empty if it has ended."""
    top = _current_frames().get(ident)
    frames = [] if top is None else [frame for frame, _ in traceback.walk_stack(top)]
    return "\n".join(_lines([(frame, frame.f_lineno) for frame in frames[:_MAX_FRAMES]]))


def stacks_in_driver() -> str:
    """Stacks of the other threads that are inside a call of the driver, innermost frame first.

    Empty if there is none.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = list[str]()
    for ident, top in _current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = [frame for frame, _ in traceback.walk_stack(top)]
        called = next(
            (index for index, frame in enumerate(frames) if _module(frame).startswith(_CALLERS)),
            0,
        )
        # Threads that wait for work have no frame of the driver above the caller's.
        if any(map(_is_foreign, frames[:called])):
            shown = [(frame, frame.f_lineno) for frame in frames[: min(called + 1, _MAX_FRAMES)]]
            stacks.append("\n".join([f"thread {names.get(ident, ident)!r}:", *_lines(shown)]))
    return "\n".join(stacks[:_MAX_STACKS])


def _current_frames() -> dict[int, FrameType]:
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented in spite of its name


def _is_of_the_store(error: BaseException) -> bool:
    # By name: `StorageUnavailableError` and its kin, and the errors of clients of a store.
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"StorageUnavailableError", "StorageRefusedError", "TimeoutError"})


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _is_foreign(frame: FrameType) -> bool:
    package = _package(frame)
    return package not in _OWN and package not in sys.stdlib_module_names


def _lines(frames: list[tuple[FrameType, int]]) -> list[str]:
    # A list comprehension has a frame of its own, with the line of the function around it.
    distinct = [
        (frame, line)
        for (frame, line), before in zip(frames, [None, *frames], strict=False)
        if before is None
        or (frame.f_code.co_filename, line) != (before[0].f_code.co_filename, before[1])
    ]
    return "".join(traceback.StackSummary.extract(iter(distinct)).format()).rstrip().splitlines()
