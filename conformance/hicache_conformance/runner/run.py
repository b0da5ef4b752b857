"""Run of the suite from the command line: the controller of a pytest-xdist worker.

The cases run in the worker, isolated from the user's pytest configuration. A driver that hangs or
ends the worker fails the case at hand; pytest-xdist replaces the worker, and the run goes on.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import msgspec
import pytest

from hicache_conformance.harness.process_state import processes
from hicache_conformance.model import FULL_STATUS, MESSAGE, PLUGINS, RUN_VARIABLE
from hicache_conformance.model.outcomes import (
    DETAIL_LIMIT,
    PREFLIGHT,
    Case,
    CaseOutcome,
    Header,
    Outcome,
    RunRecord,
    ended_case,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    from hicache_conformance.model.settings import Settings


MAX_HANGS: Final = 3
"""In how many cases in a row a driver may hang before the run is ended."""
MAX_WORKERS: Final = 20
"""How many workers may be replaced before a run is given up."""
EXIT_SECONDS: Final = 5.0
"""Patience with a worker that has closed its connection, and has not ended."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED: Final = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
"""How pytest ends where it has come to the end of the cases."""
_CALLERS: Final = (
    "storage_under_test.py",
    "objects/faults.py",
    "objects/storage.py",
    "sglang/storage.py",
    "runner/session.py",
)
"""Files that call a driver."""
# What would make pytest read somebody else's configuration or load somebody else's plugins.
_FOREIGN: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG", "PYTEST_CURRENT_TEST")


def run(
    settings: Settings, *, progress: Callable[[RunRecord], None] = lambda record: None
) -> RunRecord:
    """Run the suite against a driver.

    SIGINT, SIGTERM and SIGHUP end the run, and leave the record of what it had found.

    Args:
        progress: called whenever something has become known.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-conformance-") as directory:
        home = Path(directory)
        settings = replace(settings, home=directory)
        settings.write(home / "run.json")
        if settings.interface:
            # Here, because only foreign drivers need what this imports.
            from hicache_conformance.interfaces.interface import register_in

            register_in(home / PLUGINS)
        controller = _Controller(settings, progress)
        record = controller.record
        with (
            _environment(settings),
            contextlib.suppress(KeyboardInterrupt),
            controller.signals(),
            controller.log.open("a") as log,
            contextlib.redirect_stdout(log),
        ):
            status = pytest.main(_arguments(settings), plugins=[controller])
            record.finished = status in ENDED and record.cases == len(record.outcomes)
        # Also after a clean end: a driver may have left processes behind, and the run's directory
        # is removed next.
        controller.end_sessions()
        if record.signal:
            record.stopped = (
                f"{signal.Signals(record.signal).name} ended the run after {len(record.outcomes)} "
                f"of {record.cases} cases"
            )
        record.log = controller.log.read_text("utf-8", "replace")
        return record


class _Controller:
    """Plugin of the controller: collects what its worker reports, and judges how it ended."""

    def __init__(self, settings: Settings, progress: Callable[[RunRecord], None]) -> None:
        self.record = RunRecord()
        self.log = Path(settings.home, "log")
        self._settings = settings
        self._progress = progress
        self._sessions = list[int]()
        self._hangs = 0
        """In a row."""
        self._judged = ""
        """The last case that a worker ended in."""
        self._read = 0
        """Length of the log that has been looked at."""

    @contextlib.contextmanager
    def signals(self) -> Generator[None]:
        """Let signals end the run, from here to the end of the block; for the main thread only."""

        def end(number: int, _: FrameType | None) -> None:
            # The first is enough: another must not interrupt what it has begun to end.
            for each in SIGNALS:
                signal.signal(each, signal.SIG_IGN)
            self.record.signal = number
            # Before the controller waits for its worker, which may hang.
            self.end_sessions()
            raise KeyboardInterrupt

        before = {
            number: signal.signal(number, end)
            for number in SIGNALS
            # As a job in the background and `nohup` have them.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_sessions(self) -> None:
        """Kill what is left of the workers and of what they have started.

        Servers in process groups of their own included.
        """
        for process, _, fields in processes():
            if int(fields[3]) in self._sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Note the process of a worker, which makes a session of its own."""
        self._sessions.append(node.gateway._rinfo().pid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note the number of cases."""
        self.record.cases = len(ids)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Take a message of the preflight, or the start of a case.

        Raises:
            pytest.exit.Exception: the driver cannot be judged.
        """
        record, (kind, _, content) = self.record, location
        if nodeid != MESSAGE:
            name = _name(nodeid)
            case = record.catalogue[name.partition("[")[0]]
            record.running = CaseOutcome(
                case=name, rules=case.rules, levels=case.levels, outcome=Outcome.UNTESTED
            )
        elif kind == "header":
            record.header = msgspec.json.decode(content, type=Header)
        elif kind == "catalogue":
            cases = msgspec.json.decode(content, type=list[Case])
            record.catalogue = {case.name: case for case in cases}
        elif kind == "step":
            record.running = msgspec.json.decode(content, type=CaseOutcome | None)
        else:
            record.broken = msgspec.json.decode(content, type=str)
            pytest.exit(record.broken)
        self._progress(record)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the last report of a case."""
        # Those that pytest-xdist makes for a case that a worker ended in have no properties.
        ended = ended_case(report)
        if ended:
            self._ended(ended.outcome)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Judge the end of a worker.

        Raises:
            pytest.exit.Exception: the run cannot go on.
        """
        if not error:
            return
        record, running = self.record, self.record.running
        status = _exit_status(node.gateway._rinfo().pid)
        if running is None:
            # A process with too many closed drivers ends between two cases, to be replaced.
            if status != f"status {FULL_STATUS}" or not record.cases:
                pytest.exit("the worker ended outside of a case")
            return
        text = self.log.read_text("utf-8", "replace")
        told, self._read = text[self._read :], len(text)
        hung = "Timeout (" in told
        outcome = _fallen(running, told, status, self._settings)
        self._judged = running.case
        self._hangs = self._hangs + 1 if hung else 0
        if running.case == PREFLIGHT:
            record.stopped = (
                f"the driver hangs in {running.reason}" if hung else "the driver ended the process"
            )
        elif self._hangs >= MAX_HANGS:
            record.stopped = f"the driver hung in {self._hangs} cases in a row"
        self._ended(outcome)
        if record.stopped:
            pytest.exit(record.stopped)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, sched: Any) -> None:
        """Leave a case that a worker has not begun to the next one."""
        if _name(crashitem) != self._judged:
            sched.mark_test_pending(crashitem)

    def _ended(self, outcome: CaseOutcome) -> None:
        self.record.outcomes.append(outcome)
        self.record.running = None
        if outcome.outcome is Outcome.PASS:
            self._hangs = 0
        self._progress(self.record)


def _name(nodeid: str) -> str:
    """The name of a case, whose parameters may hold anything."""
    return nodeid.split("::", 2)[-1]


def _fallen(case: CaseOutcome, log: str, status: str, settings: Settings) -> CaseOutcome:
    """The outcome of a case that a worker has ended in."""
    stacks = _stacks(log)
    outcome, rule = Outcome.FAIL, "LC-3"
    if "Timeout (" not in log:
        place = re.search(r'File "(.*)", line (\d+) in (.*)', stacks)
        where = f" in {place[3]} ({Path(place[1]).name}:{place[2]})" if place else ""
        what = f"the driver ended the process with {status}{where}"
    elif case.case == PREFLIGHT:
        rule = case.rules[0]
        what = f"on an empty store, {case.reason} has not come back after {case.seconds:.0f} s"
    else:
        rule = "FT-3"
        what = f"the driver did not come back within {settings.case_seconds:.0f} s"
        # A case that merely takes long, because the machine does, is nobody's fault.
        if not stacks and not settings.interface:
            outcome, rule = Outcome.ERROR, ""
            what = f"the case did not end within {settings.case_seconds:.0f} s, outside the driver"
    reason = f"{rule}: {what}" if rule else what
    return replace(
        case,
        rules=(rule,) if case.case == PREFLIGHT else case.rules,
        outcome=outcome,
        reason=reason,
        detail="\n\n".join(filter(None, [f"{reason} in {case.case}", stacks]))[:DETAIL_LIMIT],
        broken_rule=rule,
    )


def _stacks(log: str) -> str:
    """Return the stacks of the threads that were inside a call of the driver, with their source.

    From the last dump of Python's faulthandler.
    """
    dump = re.split(r"Timeout \(|Fatal Python error: ", log)[-1]
    threads = re.split(r"\n(?=Thread 0x|Current thread 0x)", dump)[1:]
    # Up to the case: what lies above is pytest's.
    shown = "\n".join(
        re.split(r'\n.*_pytest/python.py", line', thread)[0].strip()
        for thread in threads
        if any(f'{caller}", line' in thread for caller in _CALLERS)
        # The one that a signal has ended, of a crash.
        or thread.startswith("Current thread")
    )
    return re.sub(
        r'( *)File "(.*)", line (\d+) in .*',
        lambda frame: (
            f"{frame[0]}\n{frame[1]}  {linecache.getline(frame[2], int(frame[3])).strip()}"
        ),
        shown,
    )


def _exit_status(pid: int) -> str:
    """Return how a worker has ended, and leave it to be reaped by its controller."""
    until = time.monotonic() + EXIT_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is None:
                time.sleep(0.01)
                continue
            if ended.si_code == os.CLD_EXITED:
                return f"status {ended.si_status}"
            return signal.Signals(ended.si_status).name
        break
    return "an unknown status"


def _arguments(settings: Settings) -> list[str]:
    suite = Path(str(files("hicache_conformance").joinpath("suite")))
    return [
        "-c",
        str(suite / "pytest.ini"),
        "--rootdir",
        str(suite),
        # A `conftest.py` of the user's directory must have no say in a verdict.
        "--noconftest",
        "--basetemp",
        str(Path(settings.home, "tmp")),
        "-q",
        "-s",
        *("-p", "xdist", "-p", "xdist.looponfail", "--dist", "load"),
        # Without the current directory on the path of its modules.
        *("--tx", f"popen//python={sys.executable} -P"),
        f"--max-worker-restart={MAX_WORKERS}",
        str(suite / "test_driver.py"),
    ]


@contextlib.contextmanager
def _environment(settings: Settings) -> Generator[None]:
    """Set the variables of a run's processes."""
    variables = {
        RUN_VARIABLE: str(Path(settings.home, "run.json")),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Otherwise hypothesis makes a directory where the user stands.
        "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(settings.home, "hypothesis")),
    }
    with mock.patch.dict(os.environ, variables):
        for name in _FOREIGN:
            os.environ.pop(name, None)
        yield
