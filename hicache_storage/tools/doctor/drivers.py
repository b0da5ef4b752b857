"""Checks of drivers that open nothing: plugins that are broken, and what drivers lack. The rest of
what they declare is judged by the conformance suite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import (
    config_model,
    driver_class,
    registry,
)
from hicache_storage.spec import Capabilities, DriverError, HiCacheStorage
from hicache_storage.tools.doctor.finding import Finding, Status, fail, ok

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget

OPTIONAL: Final = {
    ObjectStorage: {
        "deletes": "delete_objects",
        "clears": "clear_namespaces",
        "removals": "collect_removals",
    },
    HiCacheStorage: {"deletes": "delete", "clears": "clear", "removals": "removals"},
}
"""Methods that declared capabilities require, by base class."""


def check_plugins(target: DoctorTarget) -> Iterator[Finding]:
    """Check that every entry point of the group loads."""
    found = registry()
    yield ok("plugins", f"drivers {', '.join(sorted(found.drivers)) or 'none'}")
    for plugin in found.broken:
        distribution, _, name = plugin.owner.partition(":")
        # A broken plugin of another driver does not affect the target.
        status = Status.FAIL if target.driver in (None, name) else Status.WARN
        detail = f"{plugin.owner} is broken: {type(plugin.error).__name__}: {plugin.error}"
        fix = f"reinstall {distribution}, or pip uninstall {distribution}"
        yield Finding("plugins", status, detail, fix)


def check_drivers(target: DoctorTarget) -> Iterator[Finding]:
    """Import the target, or all drivers: what they need is installed, and nothing is left out."""
    if target.driver is not None:
        yield check_contract(target.driver, Status.FAIL)
        return
    for name in sorted(registry().drivers):
        yield check_contract(name, Status.WARN)


def check_contract(name: str, lacking: Status) -> Finding:
    """Import one driver.

    Args:
        lacking: where it cannot be imported: one that is not the target is not used.
    """
    found = registry()
    try:
        spec = found.get(name)
        driver = driver_class(spec)
        config_model(spec)
    except DriverError as error:
        needed = " ".join(found.drivers[name].requires) if name in found.drivers else ""
        return Finding(name, lacking, str(error), f"pip install {needed or 'what brings it'}")
    if missing := sorted(driver.__abstractmethods__):
        detail = f"{driver.__name__} does not implement {', '.join(missing)}"
        return fail(name, detail, "implement them")
    base = ObjectStorage if issubclass(driver, ObjectStorage) else HiCacheStorage
    for capability, method in OPTIONAL[base].items():
        declared = getattr(spec.capabilities, capability) != getattr(Capabilities(), capability)
        if declared and getattr(driver, method) is getattr(base, method):
            fix = f"implement {method}(), or do not declare {capability!r}"
            return fail(name, f"declares {capability!r} without {method}()", fix)
    if spec.capabilities.networked and not spec.capabilities.may_hang:
        detail = "declares networked and may_hang=False: a silent server stops the engine, because no deadline is kept for it"
        return fail(name, detail, "leave may_hang out")
    return ok(name, f"{spec.summary or 'no summary'} ({found.owners[name]})")
