"""Records of violations, for the reports of the cases that raised them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

from hicache_conformance.model.cause import Cause, cause_of
from hicache_conformance.model.outcomes import DETAIL_LIMIT
from hicache_conformance.model.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_conformance.harness.log_records import CauseLog

MAX_CAUSES: Final = 3


def describe_violation(
    error: BaseException, log: CauseLog | None = None, *, injects: bool = False
) -> dict[str, Any] | None:
    """Return the report's record of a violation; None if `error` is, and holds, none.

    Args:
        error: raised by a case.
        log: of the case.
        injects: the case makes the store fail or damages pages, so that faults of the store
            explain nothing.
    """
    violation = next((found for found in _unwrapped(error) if isinstance(found, Violation)), None)
    if violation is None:
        return None
    # An exception group may carry the notes in the place of the violation in it.
    notes = getattr(violation, "__notes__", []) or getattr(error, "__notes__", [])
    message, _, more = str(violation).partition("\n")
    causes = _causes(violation, log, injects=injects)
    sections = [
        *notes,
        *(f"Cause: {cause}\n{cause.traceback}" for cause in causes if cause.traceback),
    ]
    if causes:
        # The exception that a call has raised is quoted by the message itself.
        is_quoted = violation.__cause__ is not None or causes[0].error in message
        if not is_quoted:
            message += f"; answered as a miss: {causes[0]}"
        elif causes[0].place:
            message += f" ({causes[0].place})"
    return {
        "rule": violation.rule,
        "message": message,
        "detail": "\n\n".join(filter(None, [f"{message}\n{more}".rstrip(), *sections]))[
            :DETAIL_LIMIT
        ],
        "log": "\n".join(log.lines) if log else "",
        "causes": [asdict(cause) for cause in causes],
    }


def _causes(violation: Violation, log: CauseLog | None, *, injects: bool) -> list[Cause]:
    """Return the exceptions that explain a violation, the first one first."""
    if violation.__cause__ is not None:
        return [cause_of(violation.__cause__)]
    return [
        cause
        for cause in (log.causes if log else ())
        if not cause.injected and not (injects and cause.expected)
    ][:MAX_CAUSES]


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for inner in group.exceptions:
            yield from _unwrapped(inner)
