"""`hicache conformance verify`: repeats the run of a published `results.json`, and compares.

The file is somebody else's data. Seed, levels, profile, page length and cases are taken from it;
nothing of it is executed, opened or connected to: options, servers and interface are the caller's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path  # noqa: TC003 - msgspec reads the annotations
from shlex import quote
from typing import cast

import msgspec

from hicache_conformance.model.outcomes import DriverFiles, Outcome, Replay
from hicache_conformance.model.rules import Level  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.settings import PROFILES, Settings
from hicache_conformance.report.results import SCHEMA, SUITE, store_is_fresh


class PublishedDriver(msgspec.Struct, frozen=True):
    """The driver that a file is about, and what it was made of."""

    name: str
    distribution: str
    version: str
    files: DriverFiles


class PublishedCase(msgspec.Struct, frozen=True):
    """One case of a rule."""

    name: str
    outcome: Outcome


class PublishedRule(msgspec.Struct, frozen=True):
    """One rule of a file."""

    id: str
    selected: bool
    outcome: Outcome
    outcome_by_level: dict[Level, Outcome]
    reason: str
    cases: list[PublishedCase]


class Published(msgspec.Struct, frozen=True):
    """One `results.json`, as far as another run can confirm it."""

    schema: int
    suite_version: str
    driver: PublishedDriver
    seed: int
    profile: str
    levels: tuple[Level, ...]
    capabilities: dict[str, object]
    options: dict[str, object]
    verdict: str
    reason: str
    totals: dict[Outcome, int]
    rules: list[PublishedRule]
    replay: Replay | None = None
    page_bytes: int = 0


def read(path: Path) -> Published:
    """Read and validate a file, or the one in a report's directory.

    Raises:
        OSError: there is none.
        ValueError: it cannot be repeated; the message names the field and what to do.
    """
    file = path / "results.json" if path.is_dir() else path
    again = "publish the file as `hicache conformance run --report DIR` of this suite writes it"
    try:
        content: object = msgspec.json.decode(file.read_bytes())
        fields = cast("dict[str, object]", content) if isinstance(content, dict) else {}
        schema = fields.get("schema")
        if schema != SCHEMA:
            raise ValueError(
                f"{file}: schema: is {schema!r}, and this suite reads {SCHEMA}; use the {SUITE} "
                f"that the file names in suite_version"
            )
        found = msgspec.convert(content, Published)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}; {again}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if found.replay is None or found.replay.test_class:
        raise ValueError(
            f"{file}: replay: it has not been written by `hicache conformance run`, and an author's "
            f"own pytest may override parts of the suite; {again}"
        )
    if found.profile not in PROFILES:
        raise ValueError(
            f"{file}: profile: {found.profile!r} is none of {', '.join(PROFILES)}; use {SUITE} "
            f"{found.suite_version}, which wrote the file"
        )
    if not found.levels:
        raise ValueError(f"{file}: levels: none; name at least one with `--level`, and run again")
    return found


def settings_of(
    published: Published,
    driver: str,
    interface: str,
    options: dict[str, str],
    services: list[str] | None,
) -> Settings:
    """Return the settings of the run that repeats a file's.

    Args:
        driver: that of the command line; empty for the file's, which has to be installed.
        interface: of the command line, as `options` and `services`.

    Raises:
        ValueError: the run of the file was given what this command line does not give.
    """
    replay = published.replay
    assert replay is not None
    # What the file gives is shown and not used: commands are executed, options name paths and
    # addresses, and the name of a foreign driver is a module that is imported.
    missing = [
        f"-c {quote(f'{name}={value}')}"
        for name, value in replay.options.items()
        if name not in options
    ]
    if services is None:
        missing += [f"--start-server {quote(command)}" for command in replay.services or ()]
    if replay.interface and not interface:
        missing.append(f"--interface {quote(replay.interface)}")
    if replay.interface and not driver:
        missing.append(f"--driver {quote(published.driver.name)}")
    if missing:
        raise ValueError(
            f"nothing was run: the run of the file was given what only you can give here: "
            f"{' '.join(missing)}; add what you trust"
        )
    settings = Settings(
        seed=published.seed,
        profile=published.profile,
        levels=published.levels,
        page_bytes=published.page_bytes,
        driver=driver or published.driver.name,
        config=options,
        interface=interface,
        services=services,
        cases=replay.cases,
    )
    # A store that outlived the run may still hold its pages; another name gives new ones.
    fresh = store_is_fresh(published.capabilities, published.options)
    return replace(settings, run=replay.run) if fresh else settings


def compare(published: Published, now: Published) -> list[str]:
    """List the differences between a file and a run that repeats it."""
    there, here = _fields(published), _fields(now)
    why = {"verdict": now.reason}
    for rule in (*published.rules, *now.rules):
        why[rule.id] = rule.reason or why.get(rule.id, "")
    found = list[str]()
    for name in dict.fromkeys((*there, *here)):
        # Another suite may have other cases; it has the same rules.
        is_of_both = (name in there and name in here) or ": " not in name
        if is_of_both and there.get(name) != here.get(name):
            text = f"{name}: {there.get(name, 'nothing')} in the file, {here.get(name, 'nothing')} here"
            found.append(": ".join(filter(None, [text, why.get(name)])))
    return found


def _fields(run: Published) -> dict[str, str]:
    """Everything that a run and its repetition have to agree on, by name."""
    driver, files = run.driver, run.driver.files
    packages = ", ".join(files.packages)
    fields = {
        "driver.version": f"{driver.distribution} {driver.version}",
        "driver.files": f"{files.count} files of {packages} with digest {files.sha256}",
        "verdict": run.verdict,
        **{f"totals.{outcome}": f"{run.totals.get(outcome, 0)}" for outcome in Outcome},
    }
    for rule in run.rules:
        fields[rule.id] = f"{rule.outcome}" if rule.selected else "not selected"
        fields |= {
            f"{rule.id}: level {level}": f"{outcome}"
            for level, outcome in rule.outcome_by_level.items()
        }
        fields |= {f"{rule.id}: {case.name}": f"{case.outcome}" for case in rule.cases}
    return fields
