"""Checks of the machine, all checks in the order of the report, and their run.

They run in a process of their own, which a driver can hang or crash.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import signal
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor import drivers, engine_identity, lmcache, round_trip, vllm
from hicache_storage.tools.doctor.engine_command import object_of
from hicache_storage.tools.doctor.finding import Finding, Role, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from hicache_storage.tools.doctor.finding import DoctorTarget

ENOUGH_FILES: Final = 4096
"""Open files that an engine and its connections do not use up."""


def check_python(target: DoctorTarget) -> Iterator[Finding]:
    """Report the versions of Python and the SDK."""
    installed = f"hicache-storage {version('hicache-storage')}, contract HiCacheStorage v2"
    yield ok("python", f"{platform.python_version()}, {installed}")


def check_torch(target: DoctorTarget) -> Iterator[Finding]:
    """Check that torch can be imported."""
    try:
        import torch
    except ImportError as error:
        yield fail("torch", f"cannot be imported: {error}", "pip install torch")
        return
    yield ok("torch", str(torch.__version__))


def check_open_files(target: DoctorTarget) -> Iterator[Finding]:
    """Check RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        yield ok("open files", f"limit {soft}")
    else:
        low = hard != resource.RLIM_INFINITY and hard < 65536
        fix = "ulimit -n 65536" + " (as root: the hard limit is low)" * low
        detail = "an engine and its connections can use them up, and stored pages become misses"
        yield warn("open files", f"limit {soft}; {detail}", fix)


CHECKS: Final[dict[str, Callable[[DoctorTarget], Iterator[Finding]]]] = {
    "python": check_python,
    "torch": check_torch,
    "open files": check_open_files,
    "plugins": drivers.check_plugins,
    "vllm": vllm.check_vllm,
    "lmcache": lmcache.check_lmcache,
    "drivers": drivers.check_drivers,
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
    Role.AUTHOR: frozenset({"open files"}),
    Role.OPERATOR: frozenset({"torch"}),
}
"""Checks of no concern, by role."""
GRACE_SECONDS: Final = 20.0
"""Time that a check may take beyond two deadlines, in seconds.

Importing torch from a cold disk is its slowest part.
"""
_SPAWN: Final = multiprocessing.get_context("spawn")


def planned(target: DoctorTarget) -> list[str]:
    """Return the names of the checks for a target."""
    return [
        name
        for name in CHECKS
        if name not in LEFT_OUT[target.role]
        and (target.driver is not None or name != "round trip")
        and (name not in BRIDGE_OPTIONS or name == target.engine)
    ]


def with_engines_driver(target: DoctorTarget) -> DoctorTarget:
    """Return the target with the driver that the engine's command line names, and its options."""
    options = BRIDGE_OPTIONS[target.engine](target)
    driver = options.get("driver")
    if not isinstance(driver, str):
        return target
    return replace(target, driver=driver, options=object_of(options, "driver_config"))


def examine(
    target: DoctorTarget, *, checks: list[str] | None = None, grace_seconds: float = GRACE_SECONDS
) -> Iterator[Finding]:
    """Run all checks, or those named, and yield their findings as they come.

    A driver's failure raises nothing. A check that takes its process along is the last one: those
    after it would meet the same fault, and report it once more.
    """
    limit = 2 * target.deadline_seconds + grace_seconds
    with tempfile.TemporaryDirectory(
        prefix="hicache-doctor-", ignore_cleanup_errors=True
    ) as directory:
        store, log = Path(directory, "store"), Path(directory, "log")
        store.mkdir()
        target = replace(target, throwaway=str(store))
        yield from _run(target, checks or planned(target), limit, log)


def _run(target: DoctorTarget, checks: list[str], limit: float, log: Path) -> Iterator[Finding]:
    """Run checks until one takes its process along."""
    notes, theirs = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_make_checks, args=(theirs, target, checks, log))
    process.start()
    # The child alone has this end then, so that its exit is the end of the notes.
    theirs.close()
    remaining, hung = iter(checks), False
    check = next(remaining, None)
    try:
        # The limit is that of one check, and each note shows that a check goes on.
        while check is not None and not (hung := not notes.poll(limit)):
            finding: Finding | None = notes.recv()
            if finding is None:
                check = next(remaining, None)
            else:
                yield finding
    except (EOFError, OSError):
        process.join()
    finally:
        # Not `terminate`: a driver may handle that signal, or hang where Python does not get to
        # handle it.
        process.kill()
        process.join()
        notes.close()
    if check is not None:
        yield _post_mortem(check, None if hung else process.exitcode, limit, log)


def _make_checks(notes: Connection, target: DoctorTarget, checks: list[str], log: Path) -> None:
    """Make checks in this process: send each finding, and None at the end of a check."""
    # A driver may print.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for check in checks:
        for finding in CHECKS[check](target):
            notes.send(finding)
        notes.send(None)


def _post_mortem(check: str, status: int | None, limit: float, log: Path) -> Finding:
    """Describe why the process ended in a check, or that it hung."""
    if status is None:
        fix = "see with `py-spy dump` where it waits; a dead mount or a silent server is the usual reason"
        return fail(check, f"hung for {limit:.0f} s and was ended", fix)
    if status < 0:
        detail = f"took the process down with {signal.Signals(-status).name}"
    else:
        messages = log.read_text(errors="replace").strip().splitlines()
        last = messages[-1] if messages else "no message"
        detail = f"ended the process with status {status}: {last}"
    return fail(check, detail, "report it to the driver's authors")
