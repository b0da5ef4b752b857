"""The checks, in the order of the report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor import (
    drivers,
    engine_identity,
    lmcache,
    machine,
    round_trip,
    vllm,
)
from hicache_storage.tools.doctor.engine_command import object_of
from hicache_storage.tools.doctor.finding import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

CHECKS: Final[dict[str, Callable[[DoctorTarget], Iterator[Finding]]]] = {
    "python": machine.check_python,
    "torch": machine.check_torch,
    "locked memory": machine.check_locked_memory,
    "open files": machine.check_open_files,
    "plugins": drivers.check_plugins,
    "vllm": vllm.check_vllm,
    "lmcache": lmcache.check_lmcache,
    "drivers": drivers.check_drivers,
    "options": round_trip.check_options,
    "round trip": round_trip.check_round_trip,
}

BRIDGE_OPTIONS: Final = {
    "vllm": vllm.tier_options,
    "lmcache": lmcache.adapter_options,
    "sglang": engine_identity.sglang_options,
}
"""Options of the bridge on an engine's command line, by engine."""

LEFT_OUT: Final = {
    Role.ENGINE: frozenset[str](),
    Role.AUTHOR: frozenset({"locked memory", "open files"}),
    Role.OPERATOR: frozenset({"torch", "locked memory"}),
}
"""Checks of no concern, by role."""

OF_ONE_DRIVER: Final = frozenset({"options", "round trip"})


def planned(target: DoctorTarget) -> list[str]:
    """Return the names of the checks for a target."""
    return [
        name
        for name in CHECKS
        if name not in LEFT_OUT[target.role]
        and (target.driver is not None or name not in OF_ONE_DRIVER)
        and (name not in BRIDGE_OPTIONS or name == target.engine)
    ]


def with_engines_driver(target: DoctorTarget) -> DoctorTarget:
    """Return the target with the driver that the engine's command line names, and its options."""
    options = BRIDGE_OPTIONS[target.engine](target)
    driver = options.get("driver")
    if not isinstance(driver, str):
        return target
    return replace(target, driver=driver, options=object_of(options, "driver_config"))
