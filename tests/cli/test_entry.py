"""The demonstration, and what every command meets: its locale and its temporary directory."""

from __future__ import annotations

import sys

import pytest

from tests.support.commands import run_hicache, run_program

MISSING = """
import sys, tempfile
tempfile.tempdir = sys.argv.pop(1)
from hicache_storage.cli.main import main
main()
"""


def test_a_locale_without_the_characters_that_are_printed():
    # Narrow: what does not fit into a column ends in an ellipsis.
    ran = run_hicache("drivers", PYTHONIOENCODING="ascii", COLUMNS="60")
    assert ran.returncode == 0, ran.stderr
    assert "?" in ran.stdout


@pytest.mark.parametrize(
    ("command", "status"),
    [(["doctor"], 1), (["bench", "file"], 2), (["conformance", "run", "file"], 2)],
    ids=["doctor", "bench", "conformance"],
)
def test_without_a_temporary_directory_the_cause_is_told(tmp_path, command, status):
    missing = tmp_path / "missing"
    ran = run_program(sys.executable, "-c", MISSING, missing, *command)
    assert ran.returncode == status
    assert f"No such file or directory: '{missing}/hicache-" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert ("fix: set TMPDIR" in ran.stdout) == (command == ["doctor"])


@pytest.mark.merge
def test_the_demo_restores_what_a_killed_writer_acknowledged(tmp_path):
    done = run_hicache("demo", "--gib", "0.5", "--path", tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL while it stored the second conversation" in done.stdout
    assert "every acknowledged page came back, every byte verified" in done.stdout
