"""Cases: `covers`, which declares the rules that one tests, and what it judges and raises."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hicache_conformance.model import CASE_MARK
from hicache_conformance.model.cause import stacks_in_driver
from hicache_conformance.model.outcomes import Case
from hicache_conformance.model.rules import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


def covers(
    *rules: str,
    levels: Level | Sequence[Level] = Level.CORE,
    needs: Sequence[str] = (),
    corrupts: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which rules a case tests, in which levels, and what it needs."""
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
    found = dict[str, Case]()
    # The order in which pytest runs the methods of base classes, so that lists and reports agree
    # with a run.
    for home in reversed(suite.__mro__):
        for function in vars(home).values():
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == CASE_MARK and getattr(suite, function.__name__) is not None:
                    found[function.__name__] = described(function, dict(mark.kwargs))
    return found


_checks = Counter[str]()
"""Checks of the running case, by rule."""


@contextmanager
def counted_checks() -> Generator[Counter[str]]:
    """Count the checks of a case: how often it judged each rule."""
    # Global and not of a thread: a case checks in threads of its own, and no two cases run in one
    # process at the same time.
    _checks.clear()
    yield _checks


def checked(*rules: str) -> None:
    """Note that a case judges rules here, where `check` cannot say it: in a loop, or a `try`.

    The empty text stands for the rules that the case is about.
    """
    _checks.update(rules)


def check(holds: object, rule: str, message: str) -> None:
    """Judge a rule.

    Raises:
        Violation: it does not hold.
    """
    checked(rule)
    if not holds:
        raise Violation(rule, message)


class Violation(AssertionError):
    """The driver broke a rule.

    Anything else that a case raises means that the suite itself broke.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}" if rule else message)
        # Now, because a case that ends heals its faults, and a call that hung goes on.
        stacks = stacks_in_driver()
        if stacks:
            self.add_note(f"Meanwhile inside the driver:\n{stacks}")
        self.message = message
        self.rule = rule
        """The broken rule; empty where it is the one that the running case is about."""

    def __reduce__(self) -> tuple[type[Violation], tuple[str, str]]:
        return Violation, (self.rule, self.message)


class Inconclusive(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # pytest builds this class at run time
    """A case cannot find out; its rules count as untested, which no verdict hides."""


class NotPromised(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # as above
    """A case asks for what the interface of a foreign driver cannot express.

    Its rules count as not declared.
    """
