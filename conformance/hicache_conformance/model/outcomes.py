"""Outcomes of cases, the record of a run, and its verdict: one outcome for each rule, and one for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.model import OUTCOME_PROPERTY
from hicache_conformance.model.cause import Cause  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.fault_plan import FaultPlan  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.rules import LEVEL_NEEDS, Level, Rule, rules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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


# The verdict
# ------------------------------------------------------------------------------------------------


# A rule ends as the first of these that any of its cases ended as.
_WORST_FIRST = (Outcome.FAIL, Outcome.ERROR, Outcome.UNTESTED, Outcome.PASS, Outcome.NOT_DECLARED)


STOPPED_AT: Final = " stopped at a violation of "
"""Between a case and the rule whose violation kept it from judging its own."""
DID_NOT_CHECK: Final = " did not check it"
"""Behind the names of the cases of a rule that passed, where all of them judged other rules alone."""
DID_NOT_RUN: Final = " did not run"
"""Behind the names of cases that left no outcome."""


class Verdict(StrEnum):
    """Verdict on a driver, over the levels that were selected."""

    CONFORMANT = "conformant"
    NON_CONFORMANT = "non-conformant"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class RuleResult:
    """Result of a rule."""

    rule: Rule
    selected: bool
    """Whether one of its levels was selected; only then it counts."""
    levels: dict[Level, Outcome] = field(default_factory=dict[Level, Outcome])
    """By selected level."""
    outcome: Outcome = Outcome.UNTESTED
    """The worst of its levels."""
    reason: str = ""
    """Why it is not a pass."""
    cases: list[CaseOutcome] = field(default_factory=list[CaseOutcome])

    @property
    def asserting_cases(self) -> int:
        """Number of cases that ran and judged the rule."""
        return sum(
            self.rule.id in case.checked and case.outcome in (Outcome.PASS, Outcome.FAIL)
            for case in self.cases
        )

    @property
    def seconds(self) -> float:
        """Time that its cases took; a case of several rules counts in each."""
        return sum(case.seconds for case in self.cases)

    def failing(self) -> list[CaseOutcome]:
        """The cases that found it broken, or else those in which the suite broke."""
        failed = [
            case
            for case in self.cases
            if case.outcome is Outcome.FAIL and case.broken_rule in ("", self.rule.id)
        ]
        return failed or [case for case in self.cases if case.outcome is Outcome.ERROR]


@dataclass(frozen=True, slots=True)
class SharedCause:
    """One cause of several broken rules."""

    cause: Cause
    rules: list[str]


@dataclass(slots=True)
class Judgement:
    """A whole run, judged."""

    verdict: Verdict
    reason: str
    rules: list[RuleResult]

    def count(self, outcome: Outcome) -> int:
        """Count the selected rules of an outcome."""
        return sum(result.selected and result.outcome is outcome for result in self.rules)

    def shared_causes(self) -> list[SharedCause]:
        """Return the causes that explain several rules each, those of most rules first.

        A rule's cause is the first one of its first failing case: later ones may be damage of that.
        """
        found = dict[str, SharedCause]()
        for result in self.rules:
            if result.selected and result.outcome is Outcome.FAIL:
                for cause in result.failing()[0].causes[:1]:
                    shared = found.setdefault(cause.defect, SharedCause(cause, []))
                    shared.rules.append(result.rule.id)
        several = [shared for shared in found.values() if len(shared.rules) > 1]
        return sorted(several, key=lambda shared: -len(shared.rules))


def judge(
    record: RunRecord, selected: Collection[Level], catalogue: Mapping[str, Case]
) -> Judgement:
    """Judge what a run has written down.

    Args:
        catalogue: all cases of the suite by function name; one that left no outcome makes its rules
            untested.
    """
    results = [
        _result(rule, record.outcomes, selected, catalogue, record) for rule in rules().values()
    ]
    verdict, reason = _verdict(results, record)
    return Judgement(verdict, reason, results)


def _result(
    rule: Rule,
    outcomes: list[CaseOutcome],
    selected: Collection[Level],
    catalogue: Mapping[str, Case],
    record: RunRecord,
) -> RuleResult:
    mine = [case for case in outcomes if rule.id in case.rules or rule.id == case.broken_rule]
    levels = [level for level in Level if level in selected and _counts_in(rule, level, mine)]
    result = RuleResult(rule, bool(levels), cases=mine)
    if not levels:
        result.reason = f"level {' and '.join(rule.levels)} was not selected"
        return result
    # Before the cases are looked at: a foreign driver may keep a rule by chance, and its interface
    # still does not promise it.
    not_promised = record.header.not_promised.get(rule.id) if record.header else None
    if not_promised:
        result.levels = dict.fromkeys(levels, Outcome.NOT_DECLARED)
        result.outcome = Outcome.NOT_DECLARED
        result.reason = not_promised
        return result
    reasons = dict[Outcome, str]()
    for level in levels:
        verdicts = list(_verdicts(rule, level, mine, catalogue, record))
        where = f"level {level}: " if len(levels) > 1 else ""
        for outcome, reason in verdicts:
            reasons.setdefault(outcome, reason if outcome is Outcome.FAIL else where + reason)
        result.levels[level] = worst(outcome for outcome, _ in verdicts)
    result.outcome = worst(result.levels.values())
    result.reason = "" if result.outcome is Outcome.PASS else reasons[result.outcome]
    return result


def _counts_in(rule: Rule, level: Level, cases: list[CaseOutcome]) -> bool:
    """A rule counts in its own levels, and wherever a case met it broken."""
    return level in rule.levels or any(
        case.outcome is Outcome.FAIL and case.broken_rule == rule.id and level in case.levels
        for case in cases
    )


def _verdicts(
    rule: Rule,
    level: Level,
    mine: list[CaseOutcome],
    catalogue: Mapping[str, Case],
    record: RunRecord,
) -> Iterable[tuple[Outcome, str]]:
    ran = [case for case in mine if level in case.levels]
    passed = [case for case in ran if case.outcome is Outcome.PASS]
    if passed and not any(rule.id in case.checked for case in passed):
        yield Outcome.UNTESTED, f"{', '.join(case.case for case in passed)}{DID_NOT_CHECK}"
    for case in ran:
        # It stopped at another rule's violation, so that it did not get as far as this one.
        if case.outcome is Outcome.FAIL and case.broken_rule not in ("", rule.id):
            yield Outcome.UNTESTED, f"{case.case}{STOPPED_AT}{case.broken_rule}"
        else:
            yield case.outcome, case.reason
    planned = [
        case for case in catalogue.values() if rule.id in case.rules and level in case.levels
    ]
    # A case that was planned and left no outcome was deselected, or the run ended before it: what
    # it would have found is not known.
    left = {case.name for case in planned} - {case.function for case in ran}
    if left:
        not_run = f"not judged: {record.stopped}" if record.stopped else ""
        yield Outcome.UNTESTED, not_run or f"{', '.join(sorted(left))}{DID_NOT_RUN}"
    if not ran and not left:
        missing = [
            need for need in (rule.needs, LEVEL_NEEDS.get(level)) if need in record.undeclared
        ]
        if missing:
            yield Outcome.NOT_DECLARED, f"the driver does not declare {missing[-1]}"
        else:
            yield Outcome.UNTESTED, "no case of this suite tests it yet"


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of what consists of others, of which there is at least one."""
    present = set(outcomes)
    return next(outcome for outcome in _WORST_FIRST if outcome in present)


def _verdict(results: list[RuleResult], record: RunRecord) -> tuple[Verdict, str]:
    def ids(outcome: Outcome) -> list[str]:
        return [
            result.rule.id for result in results if result.selected and result.outcome is outcome
        ]

    failed, broken, untested = ids(Outcome.FAIL), ids(Outcome.ERROR), ids(Outcome.UNTESTED)
    # Failures come first, also of a run that crashed: what was found before stands.
    if failed:
        ended = f"; {record.stopped}" if record.stopped else ""
        return Verdict.NON_CONFORMANT, f"breaks {_listed(failed)}{ended}"
    if record.broken or record.stopped:
        return Verdict.INCOMPLETE, record.broken or record.stopped
    if not record.finished:
        return Verdict.INCOMPLETE, "the run ended before its time"
    if broken:
        return Verdict.INCOMPLETE, f"the suite itself broke in {_listed(broken)}"
    replay = record.header.replay if record.header else None
    if untested and replay and replay.cases and record.outcomes:
        passed = sum(case.outcome is Outcome.PASS for case in record.outcomes)
        named = f"{passed} of {len(record.outcomes)} cases that were named passed"
        return Verdict.INCOMPLETE, f"{named}; a verdict needs all cases"
    if untested:
        return Verdict.INCOMPLETE, f"{len(untested)} rules untested: {_listed(untested)}"
    # Else a driver that declares nothing, or a level without rules, would conform.
    if not ids(Outcome.PASS):
        return Verdict.INCOMPLETE, "no rule was tested"
    return (
        Verdict.CONFORMANT,
        ("every rule of the selected levels that the driver's capabilities bind it to holds"),
    )


def _listed(ids: list[str], limit: int = 8) -> str:
    more = f" and {len(ids) - limit} more" if len(ids) > limit else ""
    return ", ".join(ids[:limit]) + more
