"""The process that runs the checks. A driver can hang or crash it; `supervisor` detects that.

It reads a `CheckTask` from its standard input and writes one `Note` a line to the descriptor that
its argument names. Its standard output is left to the driver, which may print.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import msgspec

from hicache_storage.tools.doctor.finding import DoctorTarget, Finding  # noqa: TC001 - msgspec reads the annotations


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Checks to run, in order."""

    target: DoctorTarget
    checks: list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """Progress of a check: begun, a finding, or done."""

    check: str
    finding: Finding | None = None
    done: bool = False


def main() -> None:
    """Run the checks of the task."""
    from hicache_storage.tools.doctor.plan import CHECKS

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
