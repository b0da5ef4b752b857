"""`--help` is printed completely."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import pytest
import typer
from rich.text import Text

from hicache_storage.cli.main import COMMAND_GROUP, OWN_COMMANDS, app


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
