"""The process that examines. A driver can hang it or take it down; `watch` notices.

It is handed a `Task` on its standard input and writes a `Note` a line to the descriptor that its argument names: its standard
output belongs to whatever the driver prints.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import msgspec

from hicache_storage.tools.doctor.finding import Finding, Patient  # noqa: TC001 - msgspec reads the annotations


@dataclass(frozen=True, slots=True)
class Task:
    """Checks to be done, in order."""

    patient: Patient
    checks: list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """A check has begun, has found something, or is done."""

    check: str
    finding: Finding | None = None
    done: bool = False


def main() -> None:
    """Do the checks of the task."""
    from hicache_storage.tools.doctor.plan import CHECKS

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    notes = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    for check in task.checks:
        notes.write(msgspec.json.encode(Note(check)) + b"\n")
        for finding in CHECKS[check](task.patient):
            notes.write(msgspec.json.encode(Note(check, finding)) + b"\n")
        notes.write(msgspec.json.encode(Note(check, done=True)) + b"\n")


if __name__ == "__main__":
    main()
