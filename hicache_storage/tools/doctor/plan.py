"""The checks, in the order of the report, and the process that runs them. A driver can hang or crash
it; `supervisor` detects that.

It reads a `CheckTask` from its standard input and writes one `Note` a line to the descriptor that
its argument names. Its standard output is left to the driver, which may print.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_storage.tools.doctor import (
    drivers,
    endpoints,
    lmcache,
    machine,
    round_trip,
    vllm,
)
from hicache_storage.tools.doctor.engine_command import object_of
from hicache_storage.tools.doctor.finding import CheckTask, Note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

CHECKS: Final[dict[str, Callable[[DoctorTarget], Iterator[Finding]]]] = {
    "python": machine.check_python,
    "torch": machine.check_torch,
    "locked memory": machine.check_locked_memory,
    "open files": machine.check_open_files,
    "huge pages": machine.check_huge_pages,
    "clock": machine.check_clock,
    "plugins": drivers.check_plugins,
    "vllm": vllm.check_vllm,
    "lmcache": lmcache.check_lmcache,
    "registered": drivers.check_registered,
    "drivers": drivers.check_drivers,
    "options": round_trip.check_options,
    "directories": endpoints.check_directories,
    "servers": endpoints.check_servers,
    "round trip": round_trip.check_round_trip,
}

BRIDGE_OPTIONS: Final = {"vllm": vllm.tier_options, "lmcache": lmcache.adapter_options}
"""Options of the bridge on an engine's command line, by engine."""

OF_ONE_DRIVER: Final = frozenset({"registered", "options", "directories", "servers", "round trip"})


def planned(target: DoctorTarget) -> list[str]:
    """Return the names of the checks for a target."""
    return [
        name
        for name in CHECKS
        if (target.driver is not None or name not in OF_ONE_DRIVER)
        and (name not in BRIDGE_OPTIONS or name == target.engine)
    ]


def with_engines_driver(target: DoctorTarget) -> DoctorTarget:
    """Return the target with the driver that the engine's command line names, and its options."""
    options = BRIDGE_OPTIONS[target.engine](target)
    driver = options.get("driver")
    if not isinstance(driver, str):
        return target
    return replace(target, driver=driver, options=object_of(options, "driver_config"))


def main() -> None:
    """Run the checks of the task."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckTask)
    # Unbuffered: a note must have left this process before a driver can crash it.
    notes = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    for check in task.checks:
        notes.write(msgspec.json.encode(Note(check)) + b"\n")
        for finding in CHECKS[check](task.target):
            notes.write(msgspec.json.encode(Note(check, finding)) + b"\n")
        notes.write(msgspec.json.encode(Note(check, done=True)) + b"\n")


if __name__ == "__main__":
    main()
