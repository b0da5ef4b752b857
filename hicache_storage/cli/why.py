"""`hicache why`: why pages are not found, from the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_storage.cli.doctor import KNOWN_ENGINES, DriverOptions
from hicache_storage.spec import HiCacheError
from hicache_storage.tools.options import parse_pairs, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.tools.why import StoredIdentity, WhyReport

ALL_THERE, NOT_ALL_THERE, USAGE_ERROR = 0, 1, 2
MIN_WIDTH: Final = 110


def why(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY]... [ENGINE COMMAND_LINE]",
            help="Keys as the engine gives them to the store; none lists the identities that it "
            "has pages of. Behind them vllm, sglang or lmcache and what starts it.",
        ),
    ] = None,
    driver: Annotated[
        str | None,
        typer.Option(metavar="DRIVER", help="The driver, as `hicache drivers` lists it."),
    ] = None,
    config: DriverOptions = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Fields of StorageIdentity that the engine has, as JSON or a file of it; those "
            "that are left out may have any value.",
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that the store has.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Tell why pages are not found: removed, damaged, incomplete, or of another identity.

    The store of --driver and -c is opened, or the one that an engine's command line names; that also
    tells fields of the identity, which --identity completes. Nothing is changed; a page that is found
    may count as used. Exits with 0 if all pages are there, 1 if not, 2 for bad arguments or a store
    that does not answer.
    """
    try:
        report = _report(words or [], driver, parse_pairs(config or []), identity, deadline)
    except (ValueError, OSError, HiCacheError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error), "red"))
        raise typer.Exit(USAGE_ERROR) from error
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _show(report)
    all_there = all(one.answer == "there" for one in report.answers)
    raise typer.Exit(ALL_THERE if all_there else NOT_ALL_THERE)


def _report(
    words: list[str],
    driver: str | None,
    options: dict[str, str],
    identity: str | None,
    deadline: float,
) -> WhyReport:
    # Here, so that `hicache --help` imports neither the checks of doctor nor the base of drivers.
    from hicache_storage.tools.doctor.engine_command import read_object
    from hicache_storage.tools.doctor.engine_identity import identity_fields
    from hicache_storage.tools.doctor.examination import BRIDGE_OPTIONS, with_engines_driver
    from hicache_storage.tools.doctor.finding import DoctorTarget
    from hicache_storage.tools.why import WantedIdentity, explain

    keys, fields, chosen = words, dict[str, object](), dict[str, object](options)
    at = next((at for at, word in enumerate(words) if word in KNOWN_ENGINES), None)
    if at is not None:
        keys = words[:at]
        # The parser has kept the engine's options apart from this command's by "--".
        command_line = words[at + 1 :]
        target = with_engines_driver(DoctorTarget(engine=words[at], command_line=command_line))
        fields = identity_fields(target, BRIDGE_OPTIONS[target.engine](target))
        if driver is None:
            driver, chosen = target.driver, target.options | chosen
    if driver is None:
        raise ValueError("name a --driver, or an engine with a command line that names one")
    if identity is not None:
        try:
            is_text = identity.lstrip().startswith("{")
            fields |= read_object(identity if is_text else Path(identity).read_text())
        except ValueError as error:
            raise ValueError(f"--identity {error}") from error
    return explain(driver, chosen, WantedIdentity(fields), keys, deadline)


def _show(report: WhyReport) -> None:
    console = Console(highlight=False, width=max(MIN_WIDTH, Console().width))
    if report.answers:
        rows = [[one.key, str(one.answer), one.detail] for one in report.answers]
        console.print(_table(["key", "answer", "reason"], rows))
    if not all(one.parts for one in report.answers) or not report.answers:
        console.print(_identities(report.identities))


def _identities(found: list[StoredIdentity]) -> Table:
    from hicache_storage.tools.why import difference_text, varying_fields

    fields = varying_fields([one.identity for one in found])
    rows = [
        [
            one.pool,
            size_text(one.page_bytes),
            ", ".join(filter(None, [f"model {one.identity['model']!r}", own])),
            difference_text(one.differs) or "nothing",
        ]
        for one, own in zip(found, fields, strict=True)
    ]
    return _table(["pool", "page", "identity in the store", "differs in"], rows)


def _table(headers: list[str], rows: Iterable[list[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
