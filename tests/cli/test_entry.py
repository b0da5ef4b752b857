"""The demonstration, and what every command meets: its help, its locale, its temporary directory."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points

import pytest
import typer
from rich.text import Text

from hicache_storage.cli.main import COMMAND_GROUP, OWN_COMMANDS, app
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


@pytest.mark.parametrize("command", [["doctor"], ["bench", "file"], ["conformance", "run", "file"]])
def test_without_a_temporary_directory_the_cause_is_told(tmp_path, command):
    missing = tmp_path / "missing"
    ran = run_program(sys.executable, "-c", MISSING, missing, *command)
    assert ran.returncode == 2
    assert f"No such file or directory: '{missing}/hicache-" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.merge
def test_the_demo_restores_what_a_killed_writer_acknowledged(tmp_path):
    done = run_hicache("demo", "--gib", "0.5", "--path", tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acknowledged before the writer was killed (SIGKILL)" in done.stdout
    assert "every acknowledged page came back, every byte verified" in done.stdout


# Help.


def texts(command, name):
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for each, subcommand in getattr(command, "commands", {}).items():
        yield from texts(subcommand, f"{name} {each}")


TEXTS = list(texts(typer.main.get_command(app()), "hicache"))


def test_nothing_is_taken_for_markup():
    """Rich shows `[default: 5]` as nothing at all."""
    assert [name for name, text in TEXTS if Text.from_markup(text).plain != text] == []
    assert Text.from_markup("a [default: 5]").plain == "a "


def test_everything_is_explained():
    assert [name for name, text in TEXTS if not text] == []


def test_the_sdks_own_commands_are_listed():
    packages = {point.name for point in entry_points(group=COMMAND_GROUP)}
    assert set(typer.main.get_command(app()).commands) - packages == set(OWN_COMMANDS)


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_a_package_does_not_hide_a_command_of_the_sdk(name, monkeypatch):
    point = EntryPoint(name, "hicache_conformance.cli:app", COMMAND_GROUP)
    monkeypatch.setattr("hicache_storage.cli.main.entry_points", lambda group: [point])
    assert set(typer.main.get_command(app(name)).commands) == set(OWN_COMMANDS)
