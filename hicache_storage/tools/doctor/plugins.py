"""Checks of the installation: broken plugins, duplicate names, missing packages."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Final

from hicache_storage.plugins import DISABLED_PLUGINS_VARIABLE, registry
from hicache_storage.tools.doctor.finding import Finding, Status, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget

CONFORMANCE_NEEDS: Final = ("hypothesis", "jinja2", "pytest")


def check_plugins(target: DoctorTarget) -> Iterator[Finding]:
    """Check that every entry point of the group loads, and that no two register one name."""
    found = registry()
    yield ok(
        "plugins",
        f"drivers {', '.join(sorted(set(found.drivers) - set(found.conflicts))) or 'none'}",
    )
    for plugin in found.broken:
        distribution, _, name = plugin.owner.partition(":")
        # A broken plugin of another driver does not affect the target.
        status = Status.FAIL if target.driver in (None, name) else Status.WARN
        fix = f"reinstall {distribution}, or pip uninstall {distribution}, or hide it: {DISABLED_PLUGINS_VARIABLE}={name}"
        yield Finding(
            "plugins",
            status,
            f"{plugin.owner} is broken: {type(plugin.error).__name__}: {plugin.error}",
            fix,
        )
    for driver, owners in found.conflicts.items():
        status = Status.FAIL if target.driver in (None, driver) else Status.WARN
        distributions = sorted({owner.partition(":")[0] for owner in owners})
        fix = f"pip uninstall all but one of {', '.join(distributions)}"
        yield Finding(
            "plugins", status, f"driver {driver!r} is registered by {' and '.join(owners)}", fix
        )
    disabled = os.environ.get(DISABLED_PLUGINS_VARIABLE)
    if disabled:
        yield warn(
            "plugins",
            f"{DISABLED_PLUGINS_VARIABLE} hides {disabled}",
            f"unset {DISABLED_PLUGINS_VARIABLE}",
        )


def check_conformance(target: DoctorTarget) -> Iterator[Finding]:
    """Check that the packages of `hicache conformance` are installed."""
    missing = [name for name in CONFORMANCE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install 'hicache-storage[conformance]'"
        yield warn("conformance suite", f"cannot run: {', '.join(missing)} not installed", fix)
    else:
        yield ok("conformance suite", "installed")


def check_registered(target: DoctorTarget) -> Iterator[Finding]:
    """Check that a plugin registers the target."""
    found = registry()
    if target.driver is None or target.driver in found.conflicts:
        return
    if target.driver not in found.drivers:
        installed = ", ".join(sorted(found.drivers)) or "none"
        yield fail(
            target.driver,
            f"no plugin registers it; installed: {installed}",
            "pip install the package that brings it",
        )
    else:
        spec = found.drivers[target.driver]
        yield ok(target.driver, f"{spec.summary or 'no summary'} ({found.owners[target.driver]})")
