"""The reference of the command line, made from the commands themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click
import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

INTRODUCTION: Final = """# Command line

`hicache` has the SDK's own commands and those of every installed package that brings some (entry points
`hicache_storage.commands`). This page is made from the commands; `--help` says the same for the version that is installed.
"""


def command_line() -> str:
    """Markdown of all commands, each with its arguments, options and exit statuses."""
    from hicache_storage.cli.main import app

    group = typer.main.get_command(app())
    return "\n".join([INTRODUCTION, *_commands(group, "hicache")])


def _commands(command: click.Command, name: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        if name.count(" "):
            yield f"## `{name}`\n\n{_prose(command.help)}\n"
        for each in sorted(command.commands):
            yield from _commands(command.commands[each], f"{name} {each}")
        return
    level = "##" if name.count(" ") == 1 else "###"
    yield f"{level} `{name}`\n\n{_prose(command.help)}\n"
    yield f"```text\n{_usage(command, name)}\n```\n"
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    if rows:
        yield "\n".join(["| | default | |", "|---|---|---|", *rows, ""])


def _usage(command: click.Command, name: str) -> str:
    return " ".join([name, *command.collect_usage_pieces(click.Context(command))])


def _row(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        value = "" if parameter.is_flag else f" {parameter.make_metavar(click.Context(click.Command('')))}"
        help_text = parameter.help or ""
    else:
        names, value, help_text = f"`{parameter.human_readable_name}`", "", getattr(parameter, "help", None) or ""
    default, said = _default(parameter, help_text)
    more = " May be repeated." if parameter.multiple and "repeated" not in said else ""
    variable = f" Also `${parameter.envvar}`." if isinstance(parameter.envvar, str) else ""
    return f"| {names}{_code(value)} | {default} | {_cell(said + more + variable)} |"


def _default(parameter: click.Parameter, help_text: str) -> tuple[str, str]:
    """The default, which some commands say in their help because it is decided elsewhere; and the rest of the help."""
    said = re.search(r"\s*\[default: ([^\]]*)\]", help_text)
    if said:
        return f"`{said[1]}`", help_text.replace(said[0], "")
    if parameter.required:
        return "required", help_text
    default = parameter.default
    if default is None or default is False or default == () or default == "" or callable(default):
        return "", help_text
    return f"`{getattr(default, 'value', default)}`", help_text


def _prose(text: str | None) -> str:
    """A docstring's paragraphs; what stands in capitals or braces stays as it is."""
    return (text or "").split("\f")[0].strip()


def _code(text: str) -> str:
    return f" `{text.strip()}`" if text.strip() else ""


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("{", "&#123;").replace("<", "&lt;")
