"""Supervisor of the process that runs the checks.

It restarts the process after a check that hangs or crashes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import msgspec

from hicache_storage.tools.doctor.finding import CheckTask, Finding, Note, fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget

GRACE_SECONDS: Final = 20.0
"""Time that a check may take beyond two deadlines, in seconds.

Importing torch from a cold disk is its slowest part.
"""


def examine(
    target: DoctorTarget, *, checks: list[str] | None = None, grace_seconds: float = GRACE_SECONDS
) -> Iterator[Finding]:
    """Run all checks, or those named, and yield their findings as they come.

    A driver's failure raises nothing.
    """
    if checks is None:
        # Here, so that `hicache --help` does not import all checks.
        from hicache_storage.tools.doctor.plan import planned

        checks = planned(target)
    remaining = list(checks)
    limit = 2 * target.deadline_seconds + grace_seconds
    try:
        created = tempfile.TemporaryDirectory(prefix="hicache-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        fix = "set TMPDIR to a directory that can be written, such as /dev/shm"
        yield fail("temporary directory", str(error), fix)
        return
    with created as directory:
        target = replace(target, throwaway=directory)
        while remaining:
            running = remaining[0]
            with _Child(CheckTask(target, remaining)) as child:
                for note in child.notes(limit):
                    running = note.check
                    if note.finding is not None:
                        yield note.finding
                    if note.done:
                        remaining.remove(note.check)
                        running = remaining[0] if remaining else ""
                if remaining:
                    yield child.post_mortem(running, limit)
                    # The checks after it have not run yet.
                    remaining = remaining[remaining.index(running) + 1 :]


class _Child:
    """The process, and the pipe of its notes."""

    def __init__(self, task: CheckTask) -> None:
        # A file, not a pipe: a child that writes much would block on a pipe that is only read
        # afterwards.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._notes, inner = os.pipe()
        self._hung = False
        # `-P`: a file in the current directory must not be imported in place of a module of the
        # same name.
        command = [sys.executable, "-P", "-m", "hicache_storage.tools.doctor.plan", str(inner)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[inner],
            )
        finally:
            # The child alone has this end then, so that its exit is the end of the notes.
            os.close(inner)
        assert self._process.stdin is not None
        # A child that has ended already closes the pipe of its notes, which `notes` detects.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(task))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Not `terminate`: a driver may handle that signal, or hang where Python does not get to
        # handle it.
        self._process.kill()
        self._process.wait()
        os.close(self._notes)
        self._errors.close()

    def notes(self, limit: float) -> Iterator[Note]:
        """Yield notes until the child ends, or sends none for `limit` seconds."""
        rest, until = b"", time.monotonic() + limit
        while True:
            readable, _, _ = select.select(
                [self._notes], [], [], max(0.0, until - time.monotonic())
            )
            if not readable:
                self._hung = True
                return
            chunk = os.read(self._notes, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                # The limit is that of one check, and each note shows that a check goes on.
                until = time.monotonic() + limit
                yield msgspec.json.decode(line, type=Note)

    def post_mortem(self, check: str, limit: float) -> Finding:
        """Describe why the child ended, or hung, in `check`."""
        if self._hung:
            fix = "see with `py-spy dump` where it waits; a dead mount or a silent server is the usual reason"
            return fail(check, f"hung for {limit:.0f} s and was ended", fix)
        status = self._process.wait()
        if status < 0:
            return fail(
                check,
                f"took the process down with {signal.Signals(-status).name}",
                "report it to the driver's authors",
            )
        self._errors.seek(0)
        messages = self._errors.read().decode(errors="replace").strip().splitlines()
        return fail(
            check,
            f"ended the process with status {status}: {messages[-1] if messages else 'no message'}",
            "report it to the authors",
        )
