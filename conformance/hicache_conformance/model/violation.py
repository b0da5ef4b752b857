"""Exceptions that a case raises: a broken rule, or no way to test it."""

from __future__ import annotations

import pytest

from hicache_conformance.model.cause import stacks_in_driver


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
        self.rule = rule
        """The broken rule; empty where it is the one that the running case is about."""


class Inconclusive(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # pytest builds this class at run time
    """A case cannot find out; its rules count as untested, which no verdict hides."""


class NotPromised(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # as above
    """A case asks for what the interface of a foreign driver cannot express.

    Its rules count as not declared.
    """
