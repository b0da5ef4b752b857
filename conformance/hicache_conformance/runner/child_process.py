"""Run of the suite in a child process.

It is isolated from the user's pytest configuration and from crashes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_conformance.interfaces.registration import register_in
from hicache_conformance.model.outcomes import (
    DETAIL_LIMIT,
    PREFLIGHT,
    CaseOutcome,
    Outcome,
    OutcomeStream,
    RunResult,
)
from hicache_conformance.model.settings import PAGE_VARIABLE, RUN_VARIABLE, RunFile

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_SECONDS: Final = 0.05
STARTING_SECONDS: Final = 240.0
"""Patience with a process in which no case runs: it starts, or opens the driver for the first
time."""
MAX_HANGS: Final = 3
"""In how many cases in a row a foreign driver may hang before the run is ended."""
_CALLERS: Final = ("storage_under_test.py", "objects/storage.py", "sglang/storage.py")
"""Files that call a driver."""
MAX_PROCESSES: Final = 20
"""How many processes a run may take before it is given up."""
# What would make pytest read somebody else's configuration or load somebody else's plugins.
_FOREIGN: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG", "PYTEST_CURRENT_TEST")


class RunInterrupted(SystemExit):
    """A signal ended a run; `result` is what it had found."""

    def __init__(self, number: int, result: RunResult) -> None:
        super().__init__(128 + number)
        self.result = result


def run(
    request: RunFile,
    *,
    case_seconds: float = 300.0,
    progress: Callable[[OutcomeStream], None] = lambda stream: None,
) -> RunResult:
    """Run the suite against a driver.

    A foreign driver that hangs, or takes the process down, fails that case, and the run goes on
    behind it in a new process, unless it hangs in `MAX_HANGS` cases in a row.

    Args:
        request: the driver, the settings and the selected cases.
        case_seconds: a case that takes longer is taken for hanging, and the run for crashed.
        progress: called whenever something has been written down.

    Raises:
        RunInterrupted: SIGINT, SIGTERM or SIGHUP ended it.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-conformance-") as directory:
        home = Path(directory)
        file = replace(request, stream=str(home / "outcomes.jsonl"), case_seconds=case_seconds)
        stream = OutcomeStream()

        def result(hung: bool) -> RunResult:
            log = (home / "log").read_text("utf-8", "replace") if (home / "log").exists() else ""
            return RunResult(stream, log, hung, case_seconds)

        try:
            return result(_run_all(file, home, stream, case_seconds, progress))
        except (KeyboardInterrupt, SystemExit) as stop:
            status = stop.code if isinstance(stop, SystemExit) else None
            stream.signal = status - 128 if isinstance(status, int) else signal.SIGINT
            name = signal.Signals(stream.signal).name
            stream.stopped = (
                f"{name} ended the run after {len(stream.outcomes)} of {stream.cases} cases"
            )
            raise RunInterrupted(stream.signal, result(False)) from stop


def _run_all(
    file: RunFile,
    home: Path,
    stream: OutcomeStream,
    case_seconds: float,
    progress: Callable[[OutcomeStream], None],
) -> bool:
    """Run the suite, in several processes where the driver is a foreign one.

    Whether the last process was ended because a case took too long.
    """
    hung = _run_once(file, home, stream, case_seconds, progress)
    hangs = 0
    for process in range(1, MAX_PROCESSES):
        done = [outcome.case for outcome in stream.outcomes]
        if stream.finished or stream.stopped or (stream.running is None and done == file.done):
            break
        if any(outcome.outcome is Outcome.PASS for outcome in stream.outcomes[len(file.done) :]):
            hangs = 0
        if stream.running is not None and (hung or file.interface):
            stacks = _stacks((home / "log").read_text("utf-8", "replace")) if hung else ""
            # A case that merely takes long, because the machine does, is nobody's fault.
            if hung and not stacks and not file.interface:
                break
            stream.outcomes.append(_fallen(stream.running, hung, case_seconds, stacks))
            done.append(stream.running.case)
            hangs = hangs + 1 if hung else 0
            stream.running = None
        # Only foreign drivers get another process: a driver of the contract that hangs or crashes
        # ends the run.
        if hung and (hangs >= MAX_HANGS or not file.interface):
            stream.stopped = (
                f"the driver hung in {done[-1]}"
                if hangs == 1
                else f"the driver hung in {hangs} cases in a row"
            )
        elif done[-1:] == [PREFLIGHT]:
            # It would be so in each further process.
            stream.stopped = "the driver ended the process"
        if stream.stopped or not file.interface:
            break
        file = replace(file, done=done, stream=str(home / f"outcomes-{process}.jsonl"))
        hung = _run_once(file, home, stream, case_seconds, progress)
    return hung


def _run_once(
    file: RunFile,
    home: Path,
    stream: OutcomeStream,
    case_seconds: float,
    progress: Callable[[OutcomeStream], None],
) -> bool:
    """Run what is not done yet in a process of its own.

    Whether it was ended because a case took too long.
    """
    # Made anew and not overwritten, because `write` sets its mode when it creates it.
    (home / "run.json").unlink(missing_ok=True)
    file.write(home / "run.json")
    if file.interface and not (home / "plugins").exists():
        register_in(home / "plugins")
    with (home / "log").open("ab") as log:
        # A session of its own, so that what a driver has started ends with it.
        child = subprocess.Popen(
            _command(
                home,
                "test_driver.py",
                # Before the process is killed, so that the log says where each thread was.
                dump_seconds=0.9 * case_seconds,
            ),
            env=_environment(home, file),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return _follow(child, Path(file.stream), stream, case_seconds, progress)
        finally:
            # Also after a clean end: a driver may have left processes behind, and the run's
            # directory is removed next.
            _end_session(child.pid)
            child.wait()


def _end_session(leader: int) -> None:
    """Kill what is left of a child and of what it has started.

    Servers in process groups of their own included.
    """
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            # Behind the name, which may hold anything: state, parent, group, session.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def _stacks(log: str) -> str:
    """Return the stacks of the threads that hung inside a call of the driver.

    From the last traceback that pytest's faulthandler has dumped.
    """
    dump = log.rpartition("Timeout (")[2]
    threads = re.split(r"\n(?=Thread 0x|Current thread 0x)", dump)
    return "\n".join(
        # Up to the case: what lies above is pytest's.
        re.split(r'\n.*_pytest/python.py", line', thread)[0].strip()
        for thread in threads[1:]
        if any(f'{caller}", line' in thread for caller in _CALLERS)
    )


def _fallen(case: CaseOutcome, hung: bool, case_seconds: float, stacks: str) -> CaseOutcome:
    """The outcome of a case that a driver has not come back from."""
    rule, what = (
        ("FT-3", f"did not come back within {case_seconds:.0f} s")
        if hung
        else ("LC-3", "ended the process")
    )
    reason = f"{rule}: the driver {what}"
    return replace(
        case,
        outcome=Outcome.FAIL,
        reason=reason,
        detail="\n\n".join(filter(None, [f"{reason} in {case.case}", stacks]))[:DETAIL_LIMIT],
        broken_rule=rule,
    )


def _suite() -> Path:
    return Path(str(files("hicache_conformance").joinpath("suite")))


def _command(home: Path, cases: str, *, dump_seconds: float) -> list[str]:
    suite = _suite()
    return [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-c",
        str(suite / "pytest.ini"),
        "--rootdir",
        str(suite),
        # A `conftest.py` of the user's directory must have no say in a verdict.
        "--noconftest",
        "-o",
        f"faulthandler_timeout={dump_seconds:g}",
        "--basetemp",
        str(home / "tmp"),
        "-q",
        str(suite / cases),
    ]


def _environment(home: Path, file: RunFile) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    path = [str(home / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        RUN_VARIABLE: str(home / "run.json"),
        PAGE_VARIABLE: str(file.settings.page_bytes),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Otherwise hypothesis makes a directory where the user stands.
        "HYPOTHESIS_STORAGE_DIRECTORY": str(home / "hypothesis"),
    }


def _follow(
    child: subprocess.Popen[bytes],
    path: Path,
    stream: OutcomeStream,
    case_seconds: float,
    progress: Callable[[OutcomeStream], None],
) -> bool:
    """Read the outcomes as they are written, until the child has ended or a case takes too long.

    Whether it was that.
    """
    heard, position, rest = time.monotonic(), 0, ""
    while True:
        # Before the file is read, so that what was written just before the end is read, too.
        ended = child.poll() is not None
        text = ""
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
        if text:
            heard = time.monotonic()
            # The last line may be half written; it waits for the rest.
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                stream.feed(line)
            progress(stream)
        if ended or stream.stopped:
            return False
        # Between cases the longer limit counts: the process imports torch and starts servers then.
        if time.monotonic() - heard > (
            case_seconds if stream.running else max(case_seconds, STARTING_SECONDS)
        ):
            return True
        time.sleep(POLL_SECONDS)
