"""The terminal's side of a run: progress, verdict and exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from hicache_conformance.model.outcomes import CaseOutcome, Outcome, RunRecord
from hicache_conformance.model.verdict import (
    DID_NOT_RUN,
    STOPPED_AT,
    Judgement,
    RuleResult,
    Verdict,
    judge,
)
from hicache_conformance.report.results import reproduction

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console

    from hicache_conformance.model.settings import Settings

CONFORMANT, NOT_CONFORMANT, BROKEN = 0, 1, 2
TRACEBACK_LINES: Final = 6
"""Lines of a traceback in the terminal: the three innermost frames of the driver."""
LEFT_OUT: Final = f"cases of theirs{DID_NOT_RUN}"
LOG_LIMIT: Final = 3000
STYLES: Final = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.NOT_DECLARED: "dim",
    Outcome.UNTESTED: "yellow",
    Outcome.ERROR: "magenta",
    Verdict.CONFORMANT: "bold green",
    Verdict.NON_CONFORMANT: "bold red",
    Verdict.INCOMPLETE: "bold yellow",
}


def exit_status(judgement: Judgement, record: RunRecord) -> int:
    """Return the exit status of a command that judged a run."""
    if record.signal:
        return 128 + record.signal
    # A run that did not come to its end has no verdict, whatever it had found until then.
    if not record.finished and not record.stopped:
        return BROKEN
    if judgement.verdict is Verdict.CONFORMANT:
        return CONFORMANT
    # A driver that broke a rule does not conform, also where the suite broke elsewhere.
    suite_broke = judgement.count(Outcome.ERROR) and not judgement.count(Outcome.FAIL)
    return BROKEN if suite_broke else NOT_CONFORMANT


def conclude(console: Console, record: RunRecord, settings: Settings, report: Path | None) -> int:
    """Judge a run, show and report the verdict, and return the command's exit status."""
    if record.broken or record.header is None:
        log = record.log[-LOG_LIMIT:]
        reason = record.broken or record.stopped or f"the suite could not begin:\n{log}"
        console.print(Text(reason, "red"))
        return 128 + record.signal if record.signal else BROKEN
    judgement = judge(record, settings.levels, record.catalogue)
    if report is not None:
        from hicache_conformance.report.files import write_report

        write_report(report, record.header, judgement, record.catalogue)
        (report / "pytest.log").write_text(record.log, encoding="utf-8")
    show(console, judgement, record)
    if not record.finished and not record.stopped:
        console.print(Text(record.log[-LOG_LIMIT:], "red"))
    if report is not None:
        console.print(f"report: {report / 'index.html'}", highlight=False, soft_wrap=True)
    return exit_status(judgement, record)


def show(console: Console, judgement: Judgement, record: RunRecord) -> None:
    """Print every rule that is not a pass: failures first, then what nobody found out.

    The verdict comes last, because that is where a terminal ends.
    """
    assert record.header is not None
    counted = [result for result in judgement.rules if result.selected]
    for shared in judgement.shared_causes():
        console.print(
            Text.assemble(
                ("fail ", STYLES[Outcome.FAIL]),
                f"{len(shared.rules)} rules by one cause: {shared.cause}",
            ),
            soft_wrap=True,
        )
        for line in shared.cause.traceback.splitlines()[:TRACEBACK_LINES]:
            console.print(Text(f"  {line}", "dim"), soft_wrap=True)
    # By outcome and not by rule: an error of the suite must not stand between two failures.
    for outcome in (Outcome.FAIL, Outcome.ERROR):
        for result in counted:
            if result.outcome is outcome:
                console.print(
                    Text.assemble((f"{outcome} ", STYLES[outcome]), _failure(result)),
                    soft_wrap=True,
                )
                # Below each failure, because that is where it is read; wrapped by the terminal and
                # not here, so that it can be copied.
                first = result.failing()[0]
                again = reproduction(record.header, first.case)
                console.print(Text(f"  again: {again}", "dim"), soft_wrap=True)
                # Cases that were named are run to be understood.
                if record.header.replay and record.header.replay.cases:
                    _explain(console, first)
    table = Table("rules", "outcome", "reason", box=None, header_style="bold", pad_edge=False)
    left_out = 0
    for outcome in (Outcome.UNTESTED, Outcome.NOT_DECLARED):
        for reason, ids in _by_reason(result for result in counted if result.outcome is outcome):
            if reason == LEFT_OUT:
                left_out = len(ids)
            else:
                table.add_row(", ".join(ids), Text(outcome, STYLES[outcome]), Text(reason))
    if table.row_count:
        console.print(table)
    if left_out:
        # A run of one case leaves nearly all rules out: a table of them would hide its finding.
        console.print(f"{left_out} rules untested, cases of which did not run", highlight=False)
    counts = ", ".join(
        f"{judgement.count(outcome)} {outcome}" for outcome in Outcome if judgement.count(outcome)
    )
    seconds = sum(case.seconds for case in record.outcomes)
    console.print(
        f"{counts} (rules); {len(record.outcomes)} cases in {seconds:.1f} s", highlight=False
    )
    console.print(
        Text.assemble((str(judgement.verdict), STYLES[judgement.verdict]), f": {judgement.reason}"),
        soft_wrap=True,
    )


def _by_reason(results: Iterable[RuleResult]) -> list[tuple[str, list[str]]]:
    """Group rules by the reason of their outcome, whichever case gave it."""
    groups = dict[str, list[str]]()
    for result in results:
        case, stopped, rule = result.reason.partition(STOPPED_AT)
        reason = f"their cases{STOPPED_AT}{rule}" if case and stopped else result.reason
        # Of a run of few cases these are nearly all rules; the report names the cases of each.
        if reason.endswith(DID_NOT_RUN):
            reason = LEFT_OUT
        groups.setdefault(reason, []).append(result.rule.id)
    return list(groups.items())


def _explain(console: Console, case: CaseOutcome) -> None:
    """Print all there is to say about a failure."""
    console.print(Text(case.detail or case.reason), soft_wrap=True)
    if case.log:
        console.print(Text("Last log lines:", "bold"))
        shown = "\n".join(f"  {line}" for line in case.log.splitlines())
        console.print(Text(shown), soft_wrap=True)


def _failure(result: RuleResult) -> str:
    """A broken rule in one line: what its first failing case said, and how many there are."""
    first, *more = result.failing()
    others = f" and {len(more)} more" if more else ""
    message = first.reason if first.broken_rule else f"{result.rule.id}: {first.reason}"
    return f"{message} [{first.case}{others}]"


def now_running(record: RunRecord) -> str:
    """How far a run has come, in a line."""
    running = record.running
    now = f", {', '.join(running.levels)}: {running.function}" if running else ""
    return f"{len(record.outcomes)} of {record.cases or '?'} cases{now}"
