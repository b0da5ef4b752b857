"""Header of a report: driver, its files and their digest, versions, settings and machine."""

from __future__ import annotations

import hashlib
import os
import platform
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
from typing import TYPE_CHECKING, Any

import msgspec

from hicache_conformance.interfaces.interface import interface_profile
from hicache_conformance.model.outcomes import DriverFiles, Header, Replay
from hicache_conformance.model.rules import all_needs, rules, spec_version, undeclared
from hicache_storage.hookspecs import ENTRY_POINT_GROUP
from hicache_storage.plugins import registry
from hicache_storage.spec import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicache_conformance.model.settings import Settings

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
