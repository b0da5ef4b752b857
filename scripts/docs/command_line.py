"""The reference of the command line, made from the commands themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from collections.abc import Iterator

INTRODUCTION: Final = """# Command line

`hicache` has the SDK's own commands and those of every installed package that brings some (entry points
`hicache_storage.commands`). This page is made from the commands; `--help` says the same for the version that is installed, which `hicache --version`
tells.
"""
_DEFAULT: Final = re.compile(
    r"\s*\[(?:env var: (?P<variable>\w+))?(?:; )?(?:default: (?P<default>.*?))?(?:; "
    r")?(?P<more>required|x[<>]=?\S*|\S+<=?x\S*)?\]$"
)

# Types in the words of a shell; of arguments the name says enough.
_TYPES: Final = {
    "str": "TEXT",
    "int": "NUMBER",
    "int range": "NUMBER",
    "float": "NUMBER",
    "float range": "NUMBER",
    "path": "FILE",
}
_REQUIRED: Final = re.compile(r"{(\w+)}")
_TYPE: Final = re.compile(r" <([\w ]+)>")


def command_line() -> str:
    """Markdown of all commands, each with its arguments, options and exit statuses."""
    from hicache_storage.cli.main import app

    return "\n".join([INTRODUCTION, *_commands(typer.main.get_command(app()), "hicache")])


def _commands(command: object, name: str) -> Iterator[str]:
    assert isinstance(command, TyperCommand | TyperGroup)
    if name.count(" "):
        yield f"{'##' if name.count(' ') == 1 else '###'} `{name}`\n\n{(command.help or '').strip()}\n"
    if isinstance(command, TyperGroup):
        for each, subcommand in sorted(command.commands.items()):
            if not subcommand.hidden:
                yield from _commands(subcommand, f"{name} {each}")
        return
    context = typer.Context(command)
    usage = _REQUIRED.sub(r"\1", " ".join([name, *command.collect_usage_pieces(context)]))
    yield f"```text\n{usage}\n```\n"
    rows = [_row(parameter, context) for parameter in command.params if parameter.name != "help"]
    if rows:
        yield "\n".join(["| | default | |", "|---|---|---|", *rows, ""])


def _row(parameter: object, context: typer.Context) -> str:
    assert isinstance(parameter, TyperOption | TyperArgument)
    names, said = parameter.get_help_record(context) or (parameter.name or "", "")
    if isinstance(parameter, TyperArgument):
        names = names.partition(" ")[0].strip("[].")
    names = _TYPE.sub(lambda match: " " + _TYPES.get(match[1], match[1]), names)
    found = _DEFAULT.search(said)
    meaning = said[: found.start()] if found else said
    default = (
        f"`{found['default'].strip('()')}`"
        if found and found["default"]
        else found["more"]
        if found and found["more"] == "required"
        else ""
    )
    if found and found["variable"]:
        meaning += f" Also `${found['variable']}`."
    return f"| `{names}` | {default} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    """A text in a cell: what Markdown would take for its own is escaped, but in code, where it
    takes nothing."""
    parts = text.strip().split("`")
    parts[::2] = [
        part.replace("|", "\\|").replace("{", "&#123;").replace("<", "&lt;") for part in parts[::2]
    ]
    return "`".join(parts)
