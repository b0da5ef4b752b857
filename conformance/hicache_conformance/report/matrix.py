"""Drivers beside each other: one table from the `results.json` of several runs, and what was found, with the way to see it again.

Nothing but the results decides what is written: the same files give the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SYMBOLS: Final = {
    Outcome.PASS: "pass",
    Outcome.FAIL: "**FAIL**",
    Outcome.NOT_DECLARED: "n/d",
    Outcome.UNTESTED: "untested",
    Outcome.ERROR: "**error**",
}
NOT_RUN: Final = "·"
LEGEND: Final = (
    ("pass", "every case of the rule held"),
    ("**FAIL**", "a case found the rule broken; what was found stands below"),
    ("n/d", "not declared: the driver, or its interface, does not promise it; why stands below"),
    ("untested", "nobody found out; why stands below"),
    ("**error**", "the suite itself broke"),
    (NOT_RUN, "the rule's level was not run"),
)
MESSAGE_LIMIT: Final = 400
PREFACE: Final = (
    "Made by `hicache conformance matrix` from the results of real runs; `make matrix` makes them all again. What each rule asks "
    "is in [spec.md](spec.md), and what a foreign interface promises, and why, in [foreign-drivers.md](foreign-drivers.md)."
)


class DriverName(msgspec.Struct, frozen=True):
    """Which driver, of which distribution."""

    name: str
    distribution: str
    version: str


class CaseRow(msgspec.Struct, frozen=True):
    """One case of a rule."""

    name: str
    outcome: Outcome
    reason: str
    broken_rule: str
    reproduce: str = ""


class RuleRow(msgspec.Struct, frozen=True):
    """One rule of a run."""

    id: str
    text: str
    selected: bool
    outcome: Outcome
    reason: str
    cases: list[CaseRow]

    def failing(self) -> list[CaseRow]:
        """The cases that found this rule broken, or broke themselves."""
        failed = [case for case in self.cases if case.outcome is Outcome.FAIL and case.broken_rule in ("", self.id)]
        return failed or [case for case in self.cases if case.outcome is Outcome.ERROR]


class Run(msgspec.Struct, frozen=True):
    """One `results.json`, as far as it goes into the matrix."""

    driver: DriverName
    spec_version: str
    suite_version: str
    seed: int
    profile: str
    levels: list[str]
    verdict: str
    rules: list[RuleRow]
    interface: str = ""


def read_run(path: Path) -> Run:
    """Read a `results.json`, or the one in a report's directory.

    Raises:
        OSError: there is none.
        ValueError: it is none.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Run)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no results.json: {error}") from error


def matrix(runs: Sequence[Run]) -> str:
    """The whole document, in Markdown."""
    parts = [
        "# Drivers and rules",
        PREFACE,
        _table(("", "meaning"), LEGEND),
        "## Runs",
        _table(("driver", "from", "interface", "levels", "seed", "profile", "verdict"), (_about(run) for run in runs)),
        f"Contract {_one(run.spec_version for run in runs)}, suite {_one(run.suite_version for run in runs)}.",
        "## Rules",
        _table(("rule", *(run.driver.name for run in runs), "what it asks"), _rows(runs)),
    ]
    for run in runs:
        parts += _findings(run)
    return "\n\n".join(parts) + "\n"


def _about(run: Run) -> tuple[str, ...]:
    source = f"{run.driver.distribution} {run.driver.version}".strip()
    interface = run.interface or "HiCacheStorage v2"
    return f"`{run.driver.name}`", source, interface, ", ".join(run.levels), str(run.seed), run.profile, run.verdict


def _rows(runs: Sequence[Run]) -> Iterable[tuple[str, ...]]:
    texts = {rule.id: rule.text for run in runs for rule in run.rules}
    found = [{rule.id: rule for rule in run.rules} for run in runs]
    for rule, text in texts.items():
        yield rule, *(_cell(rules.get(rule)) for rules in found), text


def _cell(rule: RuleRow | None) -> str:
    return SYMBOLS[rule.outcome] if rule is not None and rule.selected else NOT_RUN


def _findings(run: Run) -> Iterable[str]:
    broken = [rule for rule in run.rules if rule.selected and rule.outcome in (Outcome.FAIL, Outcome.ERROR)]
    yield f"## {run.driver.name}"
    if not broken:
        yield "No rule that it is bound to was found broken."
    for rule in broken:
        cases = rule.failing()
        others = f" ({len(cases)} cases)" if len(cases) > 1 else ""
        command = f"\n  `{cases[0].reproduce}`" if cases[0].reproduce else ""
        yield f"- **{rule.id}**{others}: {_sentence(cases[0].reason, rule.id)}{command}"
    for outcome, title in ((Outcome.UNTESTED, "Untested"), (Outcome.NOT_DECLARED, "Not declared")):
        reasons = dict[str, list[str]]()
        for rule in run.rules:
            if rule.selected and rule.outcome is outcome:
                reasons.setdefault(rule.reason, []).append(rule.id)
        if reasons:
            yield f"{title}:"
            yield "\n".join(f"- {', '.join(rules)}: {_plain(reason)}" for reason, rules in reasons.items())


def _sentence(message: str, rule: str) -> str:
    text = _plain(message.removeprefix(f"{rule}: "))
    return text if len(text) <= MESSAGE_LIMIT else f"{text[:MESSAGE_LIMIT]} ..."


def _plain(text: str) -> str:
    """Text that a table and a list can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")


def _one(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace(chr(10), ' ') for cell in line)} |" for line in lines)
