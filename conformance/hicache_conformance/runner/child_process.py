"""Run of the suite in a child process.

It is isolated from the user's pytest configuration and from crashes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.outcomes import CaseOutcome, Outcome, OutcomeStream, RunResult
from hicache_conformance.model.settings import PAGE_VARIABLE, RUN_VARIABLE, RunFile

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_SECONDS: Final = 0.05
STARTING_SECONDS: Final = 240.0
"""Patience with a process in which no case runs: it starts, or opens the driver for the first
time."""
MAX_PROCESSES: Final = 20
"""How many processes a run may take before it is given up."""
# What would make pytest read somebody else's configuration or load somebody else's plugins.
_FOREIGN: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG", "PYTEST_CURRENT_TEST")


def run(
    request: RunFile,
    *,
    case_seconds: float = 300.0,
    progress: Callable[[OutcomeStream], None] = lambda stream: None,
) -> RunResult:
    """Run the suite against a driver or a metadata server.

    A foreign driver that hangs, or takes the process down, fails that case, and the run goes on
    behind it in a new process.

    Args:
        request: the driver or the server, the settings and the selected cases.
        case_seconds: a case that takes longer is taken for hanging, and the run for crashed.
        progress: called whenever something has been written down.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-conformance-") as directory:
        home = Path(directory)
        file = replace(request, stream=str(home / "outcomes.jsonl"))
        stream = OutcomeStream()
        hung = _run_once(file, home, stream, case_seconds, progress)
        # Only foreign drivers get another process: a driver of the contract that hangs or crashes
        # ends the run, and leaves its verdict incomplete.
        for process in range(1, MAX_PROCESSES):
            done = [outcome.case for outcome in stream.outcomes]
            if (
                not request.interface
                or stream.finished
                or (stream.running is None and done == file.done)
            ):
                break
            if stream.running is not None:
                stream.outcomes.append(_fallen(stream.running, hung, case_seconds))
                done.append(stream.running.case)
                stream.running = None
            file = replace(file, done=done, stream=str(home / f"outcomes-{process}.jsonl"))
            hung = _run_once(file, home, stream, case_seconds, progress)
        return RunResult(stream, (home / "log").read_text("utf-8", "replace"), hung, case_seconds)


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
    with (home / "log").open("ab") as log:
        # A session of its own, so that what a driver has started ends with it.
        child = subprocess.Popen(
            _command(home, "test_driver.py" if file.server is None else "test_server.py"),
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


def _fallen(case: CaseOutcome, hung: bool, case_seconds: float) -> CaseOutcome:
    """The outcome of a case that a foreign driver has not come back from."""
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
        detail=f"{reason} in {case.case}",
        broken_rule=rule,
    )


def _suite() -> Path:
    return Path(str(files("hicache_conformance").joinpath("suite")))


def _command(home: Path, cases: str) -> list[str]:
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
        "--basetemp",
        str(home / "tmp"),
        "-q",
        str(suite / cases),
    ]


def _environment(home: Path, file: RunFile) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {
        **kept,
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
        if ended:
            return False
        # Between cases the longer limit counts: the process imports torch and starts servers then.
        if time.monotonic() - heard > (
            case_seconds if stream.running else max(case_seconds, STARTING_SECONDS)
        ):
            return True
        time.sleep(POLL_SECONDS)
