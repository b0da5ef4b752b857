"""What a report says: driver, its files and their digest, versions, settings, and all outcomes.

`results.json` has everything, in an order that depends on the contract and not on the run;
`badge.json` is what shields.io asks of an endpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import (
    PackageNotFoundError,
    entry_points,
    packages_distributions,
    version,
)
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.interfaces.interface import interface_profile
from hicache_conformance.model.outcomes import (
    PREFLIGHT,
    CaseOutcome,
    DriverFiles,
    Header,
    Judgement,
    Outcome,
    Replay,
    RuleResult,
    Verdict,
)
from hicache_conformance.model.rules import Level, all_needs, rules, spec_version, undeclared
from hicache_conformance.model.settings import mentions_tmp, port_names
from hicache_storage.hookspecs import ENTRY_POINT_GROUP
from hicache_storage.plugins import registry
from hicache_storage.spec import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicache_conformance.model.settings import Settings


SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes; new fields do not raise it."""
COLOURS: Final = {
    Verdict.CONFORMANT: "brightgreen",
    Verdict.NON_CONFORMANT: "red",
    Verdict.INCOMPLETE: "orange",
}


def results(header: Header, judgement: Judgement) -> dict[str, Any]:
    """A run as plain values."""
    name, _, version = header.distribution.partition(" ")
    return {
        "schema": SCHEMA,
        "contract": "HiCacheStorage",
        "spec_version": header.spec_version,
        "suite_version": header.suite_version,
        "driver": {
            "name": header.driver,
            "distribution": name,
            "version": version,
            "files": asdict(header.files),
        },
        "capabilities": header.capabilities,
        "options": header.options,
        "environment": header.environment,
        "seed": header.seed,
        "profile": header.profile,
        "page_bytes": header.page_bytes,
        "levels": header.levels,
        "verdict": str(judgement.verdict),
        "reason": judgement.reason,
        "totals": {str(outcome): judgement.count(outcome) for outcome in Outcome},
        "interface": header.interface,
        # What `hicache conformance verify` reads, beyond what stands above.
        "replay": header.replay and asdict(header.replay),
        "shared_causes": [
            {"cause": asdict(shared.cause), "rules": shared.rules}
            for shared in judgement.shared_causes()
        ],
        # All rules, those that were not selected included, so that two files always have the same
        # rows.
        "rules": [_rule(header, result) for result in judgement.rules],
    }


def badge(header: Header, judgement: Judgement) -> dict[str, Any]:
    """A verdict and its levels; never a percentage, because a driver does not conform by 97%."""
    levels, failed = header.levels, judgement.count(Outcome.FAIL)
    named = "all levels" if len(levels) == len(Level) else ", ".join(levels)
    # What is broken is told in the place of the levels; shields.io shows one line.
    detail = f"{failed} rules broken" if failed else named
    return {
        "schemaVersion": 1,
        "label": f"HiCacheStorage v{header.spec_version}",
        "message": f"{judgement.verdict} ({detail})",
        "color": COLOURS[judgement.verdict],
    }


def as_json(record: dict[str, Any]) -> str:
    """The text of a file."""
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def reproduction(header: Header, case: str) -> str:
    """The command that runs one case again."""
    replay, parts = header.replay, ["hicache", "conformance", "run", header.driver]
    options = header.options
    if replay is not None and replay.interface:
        parts += ["--interface", replay.interface]
        # The others are those of the driver's name.
        options = replay.options
    for name, value in options.items():
        parts += ["-c", f"{name}={value}"]
    if replay is not None:
        for command in replay.services or ():
            parts += ["--start-server", command]
    parts += ["--seed", str(header.seed)]
    if case != PREFLIGHT:
        parts += ["--case", case]
    if replay is not None and store_is_fresh(header.capabilities, header.options):
        # The names of its pages are chance too.
        parts += ["--run-id", replay.run]
    if header.page_bytes:
        parts += ["--page-bytes", str(header.page_bytes)]
    if header.profile != "default":
        parts += ["--profile", header.profile]
    return shlex.join(parts)


def store_is_fresh(capabilities: Mapping[str, object], options: Mapping[str, object]) -> bool:
    """Return whether each run of a driver begins with an empty store.

    Then no page of an earlier run is found.
    """
    texts = list(options.values())
    return (
        capabilities.get("durability") in ("none", "reopen")
        or mentions_tmp(texts)
        or bool(port_names(texts))
    )


def _rule(header: Header, result: RuleResult) -> dict[str, Any]:
    return {
        "id": result.rule.id,
        "text": result.rule.text,
        "level": [str(level) for level in result.rule.levels],
        "needs": result.rule.needs,
        "selected": result.selected,
        "outcome": str(result.outcome),
        # By level as well, since one rule may hold in one process and fail between two.
        "outcome_by_level": {str(level): str(outcome) for level, outcome in result.levels.items()},
        "reason": result.reason,
        "asserting_cases": result.asserting_cases,
        "seconds": round(result.seconds, 3),
        "cases": [_case(header, case) for case in result.cases],
    }


def _case(header: Header, case: CaseOutcome) -> dict[str, Any]:
    return {
        "name": case.case,
        "outcome": str(case.outcome),
        "checked": list(case.checked),
        "reason": case.reason,
        "detail": case.detail,
        "broken_rule": case.broken_rule,
        "causes": msgspec.to_builtins(case.causes),
        "plans": msgspec.to_builtins(case.plans),
        "reproduce": reproduction(header, case.case)
        if case.outcome in (Outcome.FAIL, Outcome.ERROR)
        else "",
        "seconds": case.seconds,
    }


SUITE = "hicache-storage"
"""Distribution that this suite comes with."""


def blank_header(
    driver: str,
    settings: Settings,
    *,
    capabilities: Mapping[str, Any] | None = None,
    options: Mapping[str, str] | None = None,
    replay: Replay | None = None,
) -> Header:
    """The header of a run.

    Args:
        capabilities: of the instance under test, as plain values; None while it is not known.
    """
    # From plain values, because under pytest-xdist they arrive as JSON.
    declared = msgspec.convert(capabilities or {}, Capabilities)
    return Header(
        driver=driver,
        distribution=distribution_of(driver),
        files=driver_files(modules_of(driver)),
        seed=settings.seed,
        profile=settings.profile,
        page_bytes=settings.page_bytes,
        levels=[str(level) for level in settings.levels],
        spec_version=spec_version(),
        suite_version=installed_version(SUITE),
        capabilities=asdict(declared) if capabilities else {},
        # Of a driver that could not be asked nothing is undeclared: its rules stay untested, which
        # no verdict hides.
        undeclared=undeclared(declared, all_needs()) if capabilities else [],
        options=dict(options or {}),
        environment=environment(),
        replay=replay,
    )


def describe_interface(header: Header) -> None:
    """Write into a header what the interface of a foreign driver is and does not promise."""
    profile = interface_profile()
    interface, target = profile.interface, profile.setup.target
    assert interface is not None
    header.interface = interface.interface
    module = (target or interface.engine).partition(":")[0].partition(".")[0]
    owners = packages_distributions().get(module, [])[:1]
    header.distribution = ", ".join(
        f"{name} {version(name)}" for name in dict.fromkeys((*owners, *profile.setup.clients))
    )
    header.files = driver_files([target or interface.engine])
    for rule in rules():
        with suppress(LookupError):
            reason = interface.rule(header.driver, rule)
            if reason:
                header.not_promised[rule] = reason


def environment() -> dict[str, str]:
    """Return the versions and the machine that a report names."""
    return {
        "cpus": str(os.cpu_count()),
        # Draws the histories of calls: another version draws others from the same seed.
        "hypothesis": installed_version("hypothesis"),
        "platform": platform.platform(),
        "pytest": installed_version("pytest"),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
    }


def distribution_of(driver: str) -> str:
    """Return name and version of the distribution that registers a driver; empty for none."""
    owner = registry().owners.get(driver, "")
    names = {
        point.dist.name: point.dist.version
        for point in entry_points(group=ENTRY_POINT_GROUP)
        if point.dist
    }
    name = owner.partition(":")[0]
    return f"{name} {names[name]}" if name in names else owner


def installed_version(distribution: str) -> str:
    """Version of an installed distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


# Files of a driver
# ------------------------------------------------------------------------------------------------


def modules_of(driver: str) -> list[str]:
    """Return the modules of a driver's class, of its options and of its registration.

    Empty for a driver that no plugin registers.
    """
    spec = registry().drivers.get(driver)
    if spec is None:
        return []
    distribution, _, point = registry().owners[driver].partition(":")
    plugins = [
        found.module
        for found in entry_points(group=ENTRY_POINT_GROUP, name=point)
        if found.dist is not None and found.dist.name == distribution
    ]
    return [spec.target, spec.config, *plugins]


def driver_files(modules: Iterable[str]) -> DriverFiles:
    """Return the files of the top-level packages that hold some modules, and their digest.

    Nothing of the packages is imported. Files that Python or a tool leaves there do not count:
    `__pycache__`, and whatever begins with a dot. A namespace package counts as far as it is not
    shared: `acme.store` of `acme.store.driver`.

    Args:
        modules: names, with or without `:Class`.
    """
    found = dict[str, Path]()
    packages = list[str]()
    for module in dict.fromkeys(name.partition(":")[0] for name in modules):
        package, places = _package(module)
        if package and package not in packages:
            packages.append(package)
            found.update(_files(package, places))
    # What `sha256sum` prints, so that it can be had without this suite.
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
        for name, path in sorted(found.items(), key=lambda item: item[0].encode())
    ]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""
    return DriverFiles(packages=tuple(sorted(packages)), count=len(lines), sha256=digest)


def _package(module: str) -> tuple[str, list[Path]]:
    """Return the outermost package of a module that is no namespace, and where it is.

    An empty name where it cannot be found.
    """
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            return "", []
        if spec is None:
            return "", []
        if spec.submodule_search_locations is None:
            return name, [Path(spec.origin)] if spec.origin else []
        if spec.origin is not None:
            return name, [Path(place) for place in spec.submodule_search_locations]
    return "", []


def _files(package: str, places: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package, by names that begin with the package's."""
    home = Path(*package.split("."))
    for place in places:
        if place.is_file():
            yield (home.parent / place.name).as_posix(), place
        for directory, inner, names in os.walk(place):
            inner[:] = [name for name in inner if name != "__pycache__" and name[0] != "."]
            for name in names:
                path = Path(directory, name)
                if name[0] != "." and path.suffix != ".pyc" and path.is_file():
                    yield (home / path.relative_to(place)).as_posix(), path
