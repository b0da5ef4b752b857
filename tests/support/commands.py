"""Commands of `hicache` and programs, in this process or in a process of their own, which takes a second."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from click.testing import Result

SCRIPTS = Path(sysconfig.get_path("scripts"))
HICACHE = SCRIPTS / "hicache"
TIMEOUT_SECONDS = 840.0
"""Below what pytest allows a test, so that a hanging command is named."""


def run_here(*arguments: object, **options: Any) -> Result:
    """Run `hicache ARGUMENTS` in this process.

    Asynchronous tests call it with `asyncio.to_thread`: commands run event loops.
    """
    from typer.testing import CliRunner

    from hicache_storage.cli.main import app

    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app(*words[:1]), words, **options)


def run_metadata(*arguments: object, **options: Any) -> Result:
    """Run `hicache metadata ARGUMENTS` in this process, as `run_here`."""
    return run_here("metadata", *arguments, **options)


def run_hicache(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed `hicache ARGUMENTS` in a process of its own, whatever its status."""
    return run_program(HICACHE, *arguments, cwd=cwd, **environment)


def run_python(
    source: str, *arguments: object, status: int = 0, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own; fail with its output on another status."""
    done = run_program(sys.executable, "-c", source, *arguments, cwd=cwd, **environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def run_program(
    *command: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, whatever its status; return what it printed."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
