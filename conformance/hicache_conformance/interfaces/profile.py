"""Interface profiles: the rules and cases that a foreign interface promises.

They are listed in `sglang/rules.toml`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.harness.driver_files import driver_files
from hicache_conformance.interfaces.sglang.setup import current
from hicache_conformance.model.rules import rules

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hicache_conformance.interfaces.sglang.setup import Setup
    from hicache_conformance.model.outcomes import Header


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


@dataclass(frozen=True, slots=True)
class InterfaceProfile:
    """Limits of an interface that cases have to respect; HiCacheStorage v2 has none."""

    promises: Promises | None = None
    block_groups: bool = True
    """Whether the policy `BLOCK_GROUPS` can be asked for."""
    pool_verdicts: bool = True
    """Whether each pool's own verdict is part of an answer of exists."""
    keeps_bytes: bool = True
    """False for a simulator, whose pages cannot be read."""
    clears_at_once: bool = True
    """Whether a page that was just looked up is gone when a clear has returned."""
    repeated_keys: bool = True
    """Whether a call may name a key twice."""
    forgetting_seconds: float = 0.0
    """How long a store may need to learn that a process has ended, before another case begins."""
    patience_seconds: float | None = None
    """How long a call may take on a store that hangs; None for the storage's own deadline and a
    second."""
    visible_fields: frozenset[str] | None = None
    """Fields of the identity that the driver is told, whatever the pool; None for all."""

    def distinguishes(self, change: Mapping[str, object]) -> bool:
        """Return whether a driver can know of this difference between two identities."""
        return self.visible_fields is None or set(change) <= self.visible_fields


PATIENCE_SECONDS: Final = 11.0
"""SGLang gives a call 10 s when it detaches its driver; and a second."""
SGLANG_FIELDS: Final = frozenset(
    {"model", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size"}
)
"""What `HiCacheStorageConfig` tells a driver. Element type and layout it has from each pool, and
Mamba states have their own."""


@cache
def sglang_promises() -> Promises:
    """Return the promises of SGLang's interface."""
    text = files("hicache_conformance.interfaces.sglang").joinpath("rules.toml").read_bytes()
    return msgspec.toml.decode(text, type=Promises)


def describe_interface(header: Header, interface: str, given: Collection[str]) -> None:
    """Write into a header what the interface of a foreign driver is and does not promise.

    Args:
        header: of the run.
        interface: as the command line names it.
        given: the options that the command line has set.
    """
    setup, promises = current(), sglang_promises()
    assert setup is not None
    header.interface = promises.interface
    options = "".join(f" -c '{name}={header.options[name]}'" for name in given)
    header.again = f"hicache conformance run {header.driver} --interface {interface}{options}"
    header.distribution = foreign_distributions(setup)
    header.files = driver_files([setup.target or "sglang"])
    for rule in rules():
        with suppress(LookupError):
            reason = promises.rule(header.driver, rule)
            if reason:
                header.not_promised[rule] = reason


def foreign_distributions(setup: Setup) -> str:
    """Return names and versions of the distributions that a foreign driver comes from."""
    package = (setup.target or "sglang").partition(":")[0].partition(".")[0]
    owners = packages_distributions().get(package, [])[:1]
    return ", ".join(f"{name} {version(name)}" for name in dict.fromkeys((*owners, *setup.clients)))


@cache
def interface_profile() -> InterfaceProfile:
    """The interface profile of this process's run."""
    setup = current()
    if setup is None:
        return InterfaceProfile()
    return InterfaceProfile(
        promises=sglang_promises(),
        block_groups=False,
        pool_verdicts=False,
        keeps_bytes=setup.keeps_bytes,
        clears_at_once=setup.clears_at_once,
        repeated_keys=False,
        forgetting_seconds=setup.forgetting_seconds,
        patience_seconds=PATIENCE_SECONDS,
        visible_fields=SGLANG_FIELDS,
    )
