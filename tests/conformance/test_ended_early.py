"""Runs that end early: a driver that hangs, Ctrl-C, signals. Each leaves a verdict and a report."""

from __future__ import annotations

import os
import pty
import re
import signal

import pytest

from hicache_conformance.harness.process_state import processes
from tests.conformance.conftest import Ran
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=60)

MEMORY = ("conformance", "run", "memory", "--seed", "1", "--profile", "smoke")


@pytest.mark.long
def test_a_driver_that_hangs_in_case_after_case_is_not_given_all_of_them(site):
    cases = ("test_an_empty_chain", "test_pages_read_back", "test_host_pages_in_order")
    named = " ".join(f"--case {case}" for case in cases)
    ran = site.judge(f"HangsOnManyPages --profile smoke --seed 3 --case-seconds 4 {named}")
    assert ran.status == 1, ran.output
    assert ran.report["reason"].startswith("breaks FT-3")
    assert ran.report["reason"].endswith("; the driver hung in 3 cases in a row")
    hung = [case for case in ran.cases.values() if case["broken_rule"] == "FT-3"]
    assert len(hung) >= 3
    assert all("drivers_failing.py" in case["detail"] for case in hung)
    # Others are judged all the same.
    assert any(case["outcome"] == "pass" for case in ran.cases.values())
    # What is above the case belongs to pytest.
    assert not any("pluggy" in case["detail"] for case in hung)


@pytest.fixture
def interruptible():
    """Programs that this process starts take SIGINT and SIGHUP, also where a shell that started it
    in the background, or nohup, ignores the signal for all of them."""
    before = [
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)),
        (signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL)),
    ]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGHUP],
)
def test_a_run_that_is_interrupted_leaves_its_report_and_nothing_else(site, tmp_path, number):
    scratch, report = tmp_path / "scratch", tmp_path / "report"
    scratch.mkdir()
    with site.started(*MEMORY, "--report", str(report), TMPDIR=str(scratch)) as process:
        eventually(lambda: process.poll() is not None or _outcomes(scratch) >= 20, seconds=600)
        assert process.poll() is None
        sessions = {fields[3] for _, _, fields in processes() if fields[1] == str(process.pid)}
        assert sessions
        process.send_signal(number)
        assert process.wait(240) == 128 + number
        # What was killed may take a moment to end.
        eventually(
            lambda: not sessions & {fields[3] for _, _, fields in processes() if fields[0] != "Z"}
        )
    ran = Ran(process.returncode, "", report)
    found = ran.report
    assert found["verdict"] == "incomplete"
    assert re.fullmatch(rf"{number.name} ended the run after \d+ of \d+ cases", found["reason"])
    untested = [rule["reason"] for rule in found["rules"] if rule["outcome"] == "untested"]
    assert any(reason.endswith(f"not judged: {found['reason']}") for reason in untested)
    assert ran.rules("error") == ran.rules("fail") == set()
    assert sum(bool(rule["cases"]) for rule in found["rules"]) > 0
    assert {path.name for path in report.iterdir()} >= {"index.html", "junit.xml", "badge.json"}
    # A file system may need a moment to be unmounted by its own process.
    eventually(lambda: not any(scratch.iterdir()))


def _outcomes(scratch):
    """Count the outcomes that pytest has printed."""
    logs = [path.read_text() for path in scratch.glob("hicache-conformance-*/log")]
    return sum(len(line) for log in logs for line in re.findall(r"^[.sxF]+", log, re.MULTILINE))


@pytest.mark.long
def test_a_terminal_shows_level_case_and_how_far_the_run_has_come(site):
    ours, theirs = pty.openpty()
    shown = b""
    with site.started(*MEMORY, "--level", "core", stderr=theirs, TERM="xterm") as process:
        os.close(theirs)
        while True:
            try:
                chunk = os.read(ours, 65_536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not chunk:
                break
            shown += chunk
        assert process.wait(240) == 0
    os.close(ours)
    text = shown.decode("utf-8", "replace")
    cases = re.search(r"(\d+) cases in", text)
    assert cases
    assert re.search(rf"\d+ of {cases[1]} cases, core: test_\w+", text)
