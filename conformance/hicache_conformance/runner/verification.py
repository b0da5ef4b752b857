"""Verification of a published `results.json`: against itself, what is installed, and another run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - msgspec reads the annotations
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from hicache_conformance.harness.driver_files import driver_files, modules_of
from hicache_conformance.interfaces.profile import foreign_distributions, foreign_driver
from hicache_conformance.model.outcomes import DriverFiles, Outcome
from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.rules import Level, parse_levels
from hicache_conformance.model.settings import RunFile, Settings, mentions_tmp, port_names
from hicache_conformance.model.verdict import Verdict, worst
from hicache_conformance.report.badge import badge_of
from hicache_conformance.report.header import (
    SUITE,
    distribution_of,
    environment,
    installed_version,
)
from hicache_conformance.report.results import SCHEMA
from hicache_conformance.runner.replay import Record, RecordedCase
from hicache_storage.plugins import registry
from hicache_storage.spec import DriverNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.model.verdict import Judgement

BADGE_FIELDS: Final = ("label", "message", "color")
DIGITS: Final = 12
"""How much of a digest a message shows."""


class PublishedDriver(msgspec.Struct, frozen=True):
    """The driver that a file is about, and what it was made of."""

    name: str
    distribution: str
    version: str
    files: DriverFiles


class PublishedRule(msgspec.Struct, frozen=True):
    """One rule of the file."""

    id: str
    selected: bool
    outcome: Outcome
    outcome_by_level: dict[Level, Outcome]
    reason: str
    cases: list[RecordedCase]


class Published(msgspec.Struct, frozen=True):
    """One `results.json`, as far as another run can confirm it."""

    schema: int
    contract: str
    spec_version: str
    suite_version: str
    driver: PublishedDriver
    seed: int
    profile: str
    levels: list[str]
    environment: dict[str, str]
    verdict: Verdict
    reason: str
    totals: dict[Outcome, int]
    rules: list[PublishedRule]
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a file and what it is about."""

    differences: list[str] = field(default_factory=list[str])
    """What the file says, and is not so."""
    notes: list[str] = field(default_factory=list[str])
    """What is different here, and may be so."""


def read(path: Path) -> tuple[Published, Record]:
    """Read and validate a file, or the one in a report's directory.

    Raises:
        OSError: there is none.
        ValueError: it cannot be verified; the message names the field and what to do.
    """
    file = path / "results.json" if path.is_dir() else path
    _check_schema(file)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Published)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file}: {error}; publish the file as `hicache conformance run --report DIR` of this "
            f"suite writes it"
        ) from error
    record = Record.read(file)
    how = record.how
    if how.test_class:
        raise ValueError(
            f"{file}: replay.test_class: {how.test_class} has run the suite in its author's own "
            f"pytest, and may override parts of it; publish the file of `hicache conformance run "
            f"{found.driver.name} --report DIR`"
        )
    if found.profile not in PROFILES:
        raise ValueError(
            f"{file}: profile: {found.profile!r} is none of {', '.join(PROFILES)}; "
            f"{_other_suite(found)}"
        )
    if not found.levels:
        raise ValueError(f"{file}: levels: none; name at least one with `--level`, and run again")
    try:
        parse_levels(",".join(found.levels))
    except ValueError as error:
        raise ValueError(f"{file}: levels: {error}; {_other_suite(found)}") from error
    return found, record


def _check_schema(file: Path) -> None:
    """Check that this suite reads the file's schema.

    Raises:
        OSError: there is no file.
        ValueError: it does not.
    """
    try:
        content: object = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    fields = cast("dict[str, object]", content) if isinstance(content, dict) else {}
    number = fields.get("schema")
    if number != SCHEMA:
        raise ValueError(
            f"{file}: schema: is {number!r}, and this suite reads {SCHEMA}; use the "
            f"{SUITE} that the file names in suite_version"
        )


def _other_suite(published: Published) -> str:
    return f"use {SUITE} {published.suite_version}, which wrote the file"


def check_itself(published: Published, badge: Path | None) -> list[str]:
    """List where a file contradicts itself, or the badge that lies beside it.

    Args:
        published: the file.
        badge: its `badge.json`; None where there is none.
    """
    wrong = list[str]()
    for number, rule in enumerate(published.rules):
        where = f"rules[{number}].outcome: {rule.id} is {str(rule.outcome)!r}, and its"
        failing = any(
            case.outcome is Outcome.FAIL and case.broken_rule in ("", rule.id)
            for case in rule.cases
        )
        if rule.outcome_by_level and worst(rule.outcome_by_level.values()) is not rule.outcome:
            wrong.append(
                f"{where} outcome_by_level say {str(worst(rule.outcome_by_level.values()))!r}"
            )
        elif failing and rule.outcome is Outcome.PASS:
            wrong.append(f"{where} cases found it broken")
        elif rule.selected and rule.outcome is Outcome.FAIL and not failing:
            wrong.append(f"{where} cases did not find it broken")
    counted = {
        outcome: sum(rule.selected and rule.outcome is outcome for rule in published.rules)
        for outcome in Outcome
    }
    wrong += [
        f"totals.{outcome}: is {published.totals.get(outcome, 0)}, and {number} rules of the file "
        f"are so"
        for outcome, number in counted.items()
        if published.totals.get(outcome, 0) != number
    ]
    verdict = _verdict(counted)
    # A run that did not come to its end is incomplete, whatever its rules are.
    if published.verdict is not verdict and not (
        published.verdict is Verdict.INCOMPLETE and verdict is Verdict.CONFORMANT
    ):
        wrong.append(f"verdict: is {str(published.verdict)!r}, and the rules say {str(verdict)!r}")
    if badge is not None:
        wrong += _check_badge(published, counted[Outcome.FAIL], badge)
    return wrong


def _verdict(counted: Mapping[Outcome, int]) -> Verdict:
    if counted[Outcome.FAIL]:
        return Verdict.NON_CONFORMANT
    if counted[Outcome.ERROR] or counted[Outcome.UNTESTED] or not counted[Outcome.PASS]:
        return Verdict.INCOMPLETE
    return Verdict.CONFORMANT


def _check_badge(published: Published, failed: int, path: Path) -> list[str]:
    label = f"{published.contract} v{published.spec_version}"
    wanted = badge_of(label, published.verdict, published.levels, failed)
    try:
        shown = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [f"{path.name}: {error}"]
    return [
        f"{path.name}: {name} is {shown.get(name)!r}, and the results say {wanted[name]!r}"
        for name in BADGE_FIELDS
        if shown.get(name) != wanted[name]
    ]


def compare_installed(published: Published, record: Record) -> Comparison:
    """Compare a file with the driver, the suite and the libraries that are installed here.

    Raises:
        ValueError: the driver is not installed.
    """
    there = published.driver
    distribution, here = _installed(record)
    if not here.count:
        wanted = f"{there.distribution}=={there.version}" if there.version else there.distribution
        raise ValueError(
            f"driver.name: {there.name!r} is not installed here; install {wanted or 'it'}"
        )
    found = Comparison()
    claimed = f"{there.distribution} {there.version}".strip()
    if distribution != claimed:
        found.differences.append(
            f"driver.version: the file is about {claimed or 'no distribution'}, and "
            f"{distribution or 'no distribution'} is installed"
        )
    if here != there.files:
        found.differences.append(
            f"driver.files: the file is about {_described(there.files)}; here are "
            f"{_described(here)}"
        )
    suite = installed_version(SUITE)
    if published.suite_version != suite:
        found.notes.append(
            f"suite_version: {published.suite_version} in the file, {suite} here; another suite may "
            f"have other cases and draw other calls"
        )
    found.notes.extend(
        f"environment.{name}: {published.environment[name]} in the file, {now} here"
        for name, now in environment().items()
        if published.environment.get(name, now) != now
    )
    return found


def _installed(record: Record) -> tuple[str, DriverFiles]:
    """Return the distribution and the files of a driver, as they are installed here."""
    name = record.driver.name
    if record.how.interface:
        foreign = foreign_driver(record.how.interface, name, record.how.options)
        files = driver_files([foreign.setup.target or foreign.interface.engine])
        return (foreign_distributions(foreign), files) if files.count else ("", files)
    try:
        registry().get(name)
    except DriverNotFoundError:
        return "", DriverFiles()
    return distribution_of(name), driver_files(modules_of(name))


def run_file(
    published: Published,
    record: Record,
    given: Mapping[str, str] = MappingProxyType({}),
    services: list[str] | None = None,
) -> RunFile:
    """Return the run that repeats a file's.

    The file is somebody else's, so nothing in it is started, and no place that it names is used.

    Args:
        published: the file.
        record: the same.
        given: options of the driver, in the place of the recorded ones.
        services: commands of servers.

    Raises:
        ValueError: the run needs a secret, a place or a server that only the file names; the message
            names the field and the option to give.
    """
    options = record.config(given)
    for name in sorted(set(options) - set(given)):
        if _names_a_place(options[name]):
            raise ValueError(
                f"options.{name}: {options[name]!r} is a place that the file chose, and a driver "
                f"may remove what is there; choose one: -c {quote(name)}=..."
            )
    record.check_services(services)
    levels = parse_levels(",".join(published.levels))
    # A store that outlived the run may still hold its pages; another name gives new ones.
    run = record.how.run if record.is_throwaway else None
    return RunFile(
        driver=published.driver.name,
        config=options,
        settings=Settings.fresh(
            published.seed, published.profile, levels, run, published.page_bytes
        ),
        cases=record.how.cases,
        services=services,
        interface=record.how.interface,
    )


def _names_a_place(value: str) -> bool:
    """Return whether an option leads out of the throwaway store of a run."""
    if not mentions_tmp([value]) and not port_names([value]):
        return bool(re.search(r"[/\\~]|^\.\.", value))
    return ".." in value or not re.match(
        r"(\{tmp\}|(\w+://)?(127\.0\.0\.1|localhost):\{port:)", value
    )


def compare_run(published: Published, judgement: Judgement) -> list[str]:
    """List the differences between a file and a run that repeats it."""
    now = {result.rule.id: result for result in judgement.rules}
    then = {rule.id: rule for rule in published.rules}
    found = list[str]()
    if published.verdict is not judgement.verdict:
        found.append(
            f"verdict: {published.verdict} in the file, {judgement.verdict} here: "
            f"{judgement.reason}"
        )
    for name in dict.fromkeys((*then, *now)):
        if name not in now or name not in then:
            where = "the file" if name in then else "the suite that is installed here"
            found.append(f"{name}: only {where} has this rule")
            continue
        before, after = then[name], now[name]
        was = str(before.outcome) if before.selected else "not selected"
        is_now = str(after.outcome) if after.selected else "not selected"
        levels = {
            level: (before.outcome_by_level.get(level), after.levels.get(level))
            for level in Level
            if before.outcome_by_level.get(level) != after.levels.get(level)
        }
        if was != is_now:
            reason = after.reason or before.reason
            found.append(f"{name}: {was} in the file, {is_now} here: {reason}")
        elif levels:
            told = ", ".join(f"level {level}: {a}, {b} here" for level, (a, b) in levels.items())
            found.append(f"{name}: {told}")
    return found


def _described(files: DriverFiles) -> str:
    return f"{files.count} files of {', '.join(files.packages)} with digest {files.sha256[:DIGITS]}"
