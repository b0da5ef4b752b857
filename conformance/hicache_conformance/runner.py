"""Runs the suite in a child process of its own, so that neither the user's pytest configuration nor a crash decides."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_conformance.outcomes import Stream
from hicache_conformance.settings import RUN_VARIABLE, RunFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.settings import Settings

POLL_SECONDS: Final = 0.05
# What would make pytest read somebody else's configuration or load somebody else's plugins.
_FOREIGN: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG", "PYTEST_CURRENT_TEST")


@dataclass(frozen=True, slots=True)
class Ran:
    """What is left of a run."""

    stream: Stream
    log: str
    """What the child printed."""
    hung: bool
    """Whether it was ended because a case took too long."""


def run(
    driver: str,
    config: dict[str, str],
    settings: Settings,
    *,
    cases: Sequence[str] = (),
    case_seconds: float = 300.0,
    progress: Callable[[Stream], None] = lambda stream: None,
) -> Ran:
    """Run the suite against a driver.

    Args:
        driver: as `hicache drivers` lists it.
        config: its options; `{tmp}` stands for an empty directory.
        settings: what and how.
        cases: names that a case must contain one of; empty for all.
        case_seconds: a case that takes longer is taken for hanging, and the run for crashed.
        progress: called whenever something has been written down.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-conformance-") as directory:
        home = Path(directory)
        file = RunFile(driver=driver, config=config, settings=settings, stream=str(home / "outcomes.jsonl"), cases=list(cases))
        file.write(home / "run.json")
        with (home / "log").open("wb") as log:
            # A session of its own, so that what a driver has started ends with it.
            child = subprocess.Popen(
                _command(home), env=_environment(home), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                stream, hung = _follow(child, Path(file.stream), case_seconds, progress)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return Ran(stream, (home / "log").read_text("utf-8", "replace"), hung)


def _suite() -> Path:
    return Path(str(files("hicache_conformance").joinpath("suite")))


def _command(home: Path) -> list[str]:
    suite = _suite()
    return [
        sys.executable, "-P", "-m", "pytest", "-c", str(suite / "pytest.ini"), "--rootdir", str(suite), "--noconftest",
        "--basetemp", str(home / "tmp"), "-q", str(suite / "test_driver.py"),
    ]  # fmt: skip


def _environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {
        **kept,
        RUN_VARIABLE: str(home / "run.json"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Otherwise hypothesis makes a directory where the user stands.
        "HYPOTHESIS_STORAGE_DIRECTORY": str(home / "hypothesis"),
    }


def _follow(
    child: subprocess.Popen[bytes], path: Path, case_seconds: float, progress: Callable[[Stream], None]
) -> tuple[Stream, bool]:
    """Read the outcomes as they are written, until the child has ended or a case takes too long."""
    stream, heard = Stream(), time.monotonic()
    position, rest = 0, ""
    while True:
        ended = child.poll() is not None
        text = ""
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
        if text:
            heard = time.monotonic()
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                stream.feed(line)
            progress(stream)
        if ended:
            return stream, False
        if time.monotonic() - heard > case_seconds:
            return stream, True
        time.sleep(POLL_SECONDS)
