"""`hicache drivers`: what is installed, and what is broken."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from hicache_storage.plugins import config_model, registry
from hicache_storage.spec import Capabilities, DriverError

if TYPE_CHECKING:
    from hicache_storage.hookspecs import DriverSpec


def drivers(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show this driver's capabilities and options."),
    ] = None,
) -> None:
    """List the installed drivers, or show one of them.

    Exits with 1 if a plugin is broken or the name is unknown.
    """
    console, found = Console(), registry()
    if name is not None:
        try:
            _show(console, found.get(name))
        except DriverError as error:
            Console(stderr=True).print(f"[red]{error}[/]", highlight=False)
            raise typer.Exit(1) from error
        return
    table = Table("driver", "from", "summary", box=None, header_style="bold")
    for driver in sorted(found.drivers):
        table.add_row(driver, found.owners[driver], found.drivers[driver].summary)
    console.print(table)
    # A broken plugin was logged when it was left out.
    if found.broken:
        raise typer.Exit(1)


def _show(console: Console, spec: DriverSpec) -> None:
    console.print(f"[bold]{spec.name}[/]  {spec.summary}")
    table = Table("capability", "value", box=None, header_style="bold")
    for field in fields(Capabilities):
        table.add_row(field.name, _shown(getattr(spec.capabilities, field.name)))
    console.print(table)
    options = Table("option", "default", "meaning", box=None, header_style="bold")
    for option, default, meaning in option_rows(spec):
        options.add_row(option, default, meaning)
    console.print(options)


def option_rows(spec: DriverSpec) -> list[tuple[str, str, str]]:
    """Name, default and meaning of each option of a driver."""
    import msgspec

    info = msgspec.inspect.type_info(config_model(spec))
    assert isinstance(info, msgspec.inspect.StructType)
    rows = list[tuple[str, str, str]]()
    for field in info.fields:
        schema = cast("dict[str, object] | None", getattr(field.type, "extra_json_schema", None))
        default = "required" if field.required else _shown(field.default)
        rows.append((field.encode_name, default, str((schema or {}).get("description", ""))))
    return rows


def _shown(value: object) -> str:
    """As it is written after `-c`."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
