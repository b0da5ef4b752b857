"""Exceptions that a case raises: a broken rule, or no way to test it."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from hicache_conformance.model.cause import stacks_in_driver

if TYPE_CHECKING:
    from collections.abc import Generator


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
