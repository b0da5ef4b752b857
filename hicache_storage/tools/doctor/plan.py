"""The checks, in the order in which their findings are of use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor import drivers, machine, places, plugins, trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_storage.tools.doctor.finding import Finding, Patient

CHECKS: Final[dict[str, Callable[[Patient], Iterator[Finding]]]] = {
    "python": machine.check_python,
    "torch": machine.check_torch,
    "locked memory": machine.check_locked_memory,
    "open files": machine.check_open_files,
    "io_uring": machine.check_io_uring,
    "huge pages": machine.check_huge_pages,
    "clock": machine.check_clock,
    "plugins": plugins.check_plugins,
    "conformance suite": plugins.check_conformance,
    "registered": plugins.check_registered,
    "drivers": drivers.check_drivers,
    "options": trial.check_options,
    "directories": places.check_directories,
    "servers": places.check_servers,
    "round trip": trial.check_round_trip,
}

OF_ONE_DRIVER: Final = frozenset({"registered", "options", "directories", "servers", "round trip"})


def planned(patient: Patient) -> list[str]:
    """Names of the checks for a patient."""
    return [name for name in CHECKS if patient.driver is not None or name not in OF_ONE_DRIVER]
