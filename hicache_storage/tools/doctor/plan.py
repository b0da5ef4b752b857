"""The checks, in the order of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor import drivers, endpoints, machine, plugins, round_trip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

CHECKS: Final[dict[str, Callable[[DoctorTarget], Iterator[Finding]]]] = {
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
    "options": round_trip.check_options,
    "directories": endpoints.check_directories,
    "servers": endpoints.check_servers,
    "round trip": round_trip.check_round_trip,
}

OF_ONE_DRIVER: Final = frozenset({"registered", "options", "directories", "servers", "round trip"})


def planned(target: DoctorTarget) -> list[str]:
    """Return the names of the checks for a target."""
    return [name for name in CHECKS if target.driver is not None or name not in OF_ONE_DRIVER]
