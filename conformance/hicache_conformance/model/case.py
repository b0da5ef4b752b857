"""A case of the suite, and `covers`, which declares the rules that it tests."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_conformance.model.rules import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test function of the suite."""

    name: str
    rules: tuple[str, ...]
    levels: tuple[Level, ...]
    needs: tuple[str, ...]
    """Capabilities without which it says nothing."""
    corrupts: bool
    """Needs a way to damage a stored page below the API."""
    summary: str


def covers(
    *rules: str,
    levels: Level | Sequence[Level] = Level.CORE,
    needs: Sequence[str] = (),
    corrupts: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which rules a case tests, in which levels, and what it needs."""
    # Here, because the command line reads cases and does without pytest.
    import pytest

    from hicache_conformance.model.pytest_keys import CASE_MARK

    several = (levels,) if isinstance(levels, Level) else tuple(levels)
    # Through getattr, because the mark is registered by a plugin and pytest's stub knows only its
    # own.
    mark = getattr(pytest.mark, CASE_MARK)
    decorate: Callable[[Callable[..., None]], Callable[..., None]] = mark(
        rules=rules, levels=several, needs=tuple(needs), corrupts=corrupts
    )
    return decorate


def described(function: Callable[..., object], arguments: dict[str, Any]) -> Case:
    """The case that a test function with these arguments of `covers` is."""
    summary = " ".join((inspect.getdoc(function) or "").split())
    return Case(name=function.__name__, summary=summary, **arguments)


def cases_of(suite: type) -> dict[str, Case]:
    """The cases of a class and its bases, by function name, in the order of definition.

    A case that the class binds to None is left out.
    """
    from hicache_conformance.model.pytest_keys import CASE_MARK

    found = dict[str, Case]()
    # The order in which pytest runs the methods of base classes, so that lists and reports agree
    # with a run.
    for home in reversed(suite.__mro__):
        for function in vars(home).values():
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == CASE_MARK and getattr(suite, function.__name__) is not None:
                    found[function.__name__] = described(function, dict(mark.kwargs))
    return found
