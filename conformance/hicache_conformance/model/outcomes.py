"""Outcomes of cases, and the record of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.model import OUTCOME_PROPERTY
from hicache_conformance.model.cause import Cause  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.fault_plan import FaultPlan  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.rules import Level  # noqa: TC001 - as above

if TYPE_CHECKING:
    import pytest


class Outcome(StrEnum):
    """Outcome of a case or of a rule. They are never merged."""

    PASS = "pass"
    FAIL = "fail"
    NOT_DECLARED = "not declared"
    """The rule needs a capability that the driver does not declare."""
    UNTESTED = "untested"
    """Nobody found out."""
    ERROR = "error"
    """The suite itself broke."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """Outcome of one case, or of one phase of it."""

    case: str = ""
    """Name of the test, with its parameters."""
    rules: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    outcome: Outcome
    checked: tuple[str, ...] = ()
    """The rules of it that it has judged."""
    reason: str = ""
    """One line: what was wrong, what is not declared, why it is untested."""
    detail: str = ""
    """All there is to say about a failure: the history that led to it, the traceback of an
    error."""
    log: str = ""
    """The last lines that were logged before a failure."""
    broken_rule: str = ""
    """The rule that a failure is about."""
    seconds: float = 0.0
    plans: tuple[FaultPlan, ...] = ()
    """The faults that it put below the driver, in their order."""
    causes: tuple[Cause, ...] = ()
    """Exceptions of the driver that explain a failure, the first one first."""

    @property
    def function(self) -> str:
        """Name of the test without its parameters."""
        return self.case.partition("[")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCase:
    """The last report of a case carries it."""

    owner: str
    """Class of the case."""
    context: dict[str, Any]
    """Driver, capabilities and options; empty where the case did not come as far as that."""
    outcome: CaseOutcome


def ended_case(report: pytest.TestReport) -> EndedCase | None:
    """Return what the last report of a case says; None for any other report."""
    for name, content in report.user_properties:
        if name == OUTCOME_PROPERTY:
            return msgspec.json.decode(str(content), type=EndedCase)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Data to run a case again, beyond that in the header."""

    run: str
    """Name of the run within the identities' salts."""
    options: dict[str, str]
    """Those that were given, redacted."""
    services: list[str] | None = None
    """Commands of servers that were given; None for those that the driver names itself."""
    interface: str = ""
    """Interface of a foreign driver, as the command line names it."""
    cases: list[str] = field(default_factory=list[str])
    """Texts that the names of cases had to contain one of; empty for all."""
    test_class: str = ""
    """Class in the author's own pytest that ran it; empty for `hicache conformance run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFiles:
    """Files that a driver is made of, and their digest.

    Equal files have the same digest, wherever they are and however they were installed.
    """

    packages: tuple[str, ...] = ()
    """Top-level packages that hold the driver's class, its options and its registration."""
    count: int = 0
    """Number of files; 0 where none was found."""
    sha256: str = ""
    """Digest of what `sha256sum` prints for the files, sorted by name; empty where there are none."""


@dataclass(slots=True, kw_only=True)
class Header:
    """Facts that are known before the first case."""

    driver: str
    seed: int
    profile: str
    levels: list[str]
    spec_version: str
    suite_version: str
    page_bytes: int = 0
    """Bytes that every page is a multiple of; 0 for pages of any length."""
    distribution: str = ""
    """`name version` of the distribution that registers the driver."""
    files: DriverFiles = field(default_factory=DriverFiles)
    """Files that the driver is made of."""
    capabilities: dict[str, Any] = field(default_factory=dict[str, Any])
    undeclared: list[str] = field(default_factory=list[str])
    """What rules of the contract need and the driver does not declare."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Redacted."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    interface: str = ""
    """Interface of a foreign driver, with its version; empty for the contract's own."""
    not_promised: dict[str, str] = field(default_factory=dict[str, str])
    """Rules that such an interface does not promise, and why."""
    replay: Replay | None = None
    """For `hicache conformance verify`; None where that cannot repeat the run."""


@dataclass(slots=True)
class RunRecord:
    """All that is known of a run so far."""

    header: Header | None = None
    catalogue: dict[str, Case] = field(default_factory=dict[str, Case])
    """All cases of the suite by function name, also those that this run leaves out."""
    cases: int = 0
    """Number of cases that were collected."""
    outcomes: list[CaseOutcome] = field(default_factory=list[CaseOutcome])
    running: CaseOutcome | None = None
    """The case that has begun and not ended."""
    broken: str = ""
    """Why no case could be run at all."""
    stopped: str = ""
    """Why the run was ended before all cases had been judged; empty if it was not."""
    signal: int = 0
    """The signal that ended it; 0 for none."""
    finished: bool = False
    log: str = ""
    """What its processes printed."""

    @property
    def undeclared(self) -> list[str]:
        """Needs of rules that the driver does not declare."""
        return self.header.undeclared if self.header else []


DETAIL_LIMIT: Final = 12_000
"""Characters of a detail that are kept."""
PREFLIGHT: Final = "preflight"
"""Name of what is done before the first case: the driver is opened, and stores a page."""
