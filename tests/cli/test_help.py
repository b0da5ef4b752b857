"""`--help` is printed completely."""

from __future__ import annotations

import typer
from rich.text import Text

from hicache_storage.cli.main import app


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
