"""Promises of a foreign interface: which rules and cases bind its drivers, and why.

They are listed in the `rules.toml` of its folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection


class PromiseEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A verdict about rules, levels or cases, and the reason that a report prints with it."""

    declared: bool
    reason: str
    rules: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    """Names of test functions, or of one parametrisation of them."""
    drivers: tuple[str, ...] = ()
    """Only these drivers; empty for all."""


class Promises(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All entries about one interface."""

    interface: str
    """With the version that was read."""
    entry: tuple[PromiseEntry, ...]

    def undeclared(
        self, driver: str, case: str, rules: Collection[str], levels: Collection[str]
    ) -> str:
        """Return the reason why a case is not declared; empty where it is.

        What is said about the case comes first, then about all of its levels, then about all of its
        rules.

        Raises:
            LookupError: nothing is said about one of its rules.
        """
        entries = self._about(driver)
        # The exact parametrization first: an entry about one fault of a case overrules the entry
        # about the case.
        for name in (case, case.partition("[")[0]):
            for entry in entries:
                if name in entry.cases:
                    return "" if entry.declared else entry.reason
        reasons = [_level_reason(entries, level) for level in levels]
        # A case of several levels runs if one of them is promised.
        if all(reasons):
            return reasons[0]
        reasons = [self.rule(driver, rule) for rule in rules]
        return reasons[0] if all(reasons) else ""

    def rule(self, driver: str, rule: str) -> str:
        """Return the reason why a rule is not declared; empty where it is.

        Raises:
            LookupError: nothing is said about it.
        """
        for entry in self._about(driver):
            if rule in entry.rules:
                return "" if entry.declared else entry.reason
        raise LookupError(f"nothing is written down about whether {self.interface} promises {rule}")

    def _about(self, driver: str) -> list[PromiseEntry]:
        """Return the entries about a driver, those about it alone before those about all."""
        entries = [entry for entry in self.entry if not entry.drivers or driver in entry.drivers]
        # Stable, so that within each kind the order of the file decides.
        return sorted(entries, key=lambda entry: not entry.drivers)


def _level_reason(entries: list[PromiseEntry], level: str) -> str:
    return next(
        (entry.reason for entry in entries if level in entry.levels and not entry.declared), ""
    )
