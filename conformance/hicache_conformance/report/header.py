"""Header of a report: driver, versions, settings and machine."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any

import msgspec

from hicache_conformance.harness.driver_files import driver_files, modules_of
from hicache_conformance.model.outcomes import Header, Replay
from hicache_conformance.model.rules import all_needs, spec_version, undeclared
from hicache_storage.hookspecs import ENTRY_POINT_GROUP
from hicache_storage.plugins import registry
from hicache_storage.spec import Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

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
