"""`hicache metadata token`: make, list, end and look at the tokens of a server."""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_metadata_server.cli.options import sentence

if TYPE_CHECKING:
    from hicache_metadata_server.auth.token_file import TokenRecord

app = typer.Typer(
    help="The tokens of a server: a file that holds their digests.", no_args_is_help=True
)

UNKNOWN: Final = 1
FAILED: Final = 2


class Right(StrEnum):
    """What a token permits."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN: Final = re.compile(r"([0-9]{1,6})([mhdw])", re.ASCII)

File = Annotated[
    Path,
    typer.Option(
        "--file", metavar="FILE", help="The file of tokens.", envvar="HICACHE_METADATA_TOKEN_FILE"
    ),
]


@app.command()
def new(
    file: File,
    right: Annotated[
        Right, typer.Option(help="What it permits: to read, to write (and read), or all.")
    ],
    name: Annotated[
        str, typer.Option("--id", help="What logs call it; drawn if it is left out.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="Whose scopes it is for; none by default.")] = "",
    expires: Annotated[
        str,
        typer.Option(
            metavar="WHEN", help="In a time such as 12h, 90d, or at a date such as 2027-01-31."
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the token into this new file, which nobody else can read, in the place of "
            "printing it.",
        ),
    ] = None,
) -> None:
    """Add a token, and print it or write it into a file: it is kept nowhere else."""
    from hicache_metadata_server.auth.token_file import (
        edit_token_file,
        new_token,
        record_of,
        write_new_file,
    )

    token = new_token()
    try:
        with edit_token_file(file) as tokens, write_new_file(output, f"{token}\n".encode()):
            record = record_of(
                token, right, name=name, tenant=tenant, expires=_when(expires) if expires else None
            )
            if record.id in tokens:
                raise ValueError(f"{file} has a token {record.id} already")
            tokens[record.id] = record
    except (ValueError, OSError) as error:
        _fail(error)
    where = f"the token is in {output}" if output else "the token is told this once"
    typer.echo(f"{record.id}: {_described(record)}; {where}", err=True)
    if output is None:
        typer.echo(token)


@app.command("list")
def list_tokens(file: File) -> None:
    """Tell what is known of each token."""
    from hicache_metadata_server.auth.token_file import read_token_file

    try:
        records = read_token_file(file)
    except (ValueError, OSError) as error:
        _fail(error)
    now = datetime.now(UTC)
    table = Table(
        "id", "right", "tenant", "created", "expires", box=None, header_style="bold", pad_edge=False
    )
    for record in records:
        expires = "never" if record.expires is None else f"{record.expires:%Y-%m-%d %H:%M}Z"
        gone = record.expires is not None and record.expires <= now
        table.add_row(
            record.id,
            record.right,
            record.tenant,
            f"{record.created:%Y-%m-%d}",
            f"{expires}, expired" if gone else expires,
        )
    Console(highlight=False, soft_wrap=True).print(table)


@app.command()
def revoke(
    names: Annotated[list[str], typer.Argument(metavar="ID", help="Of tokens.")],
    file: File,
    after: Annotated[
        str,
        typer.Option(metavar="TIME", help="Let them expire in a time such as 24h, instead of now."),
    ] = "",
) -> None:
    """End tokens; running servers know it within a second or two."""
    from hicache_metadata_server.auth.token_file import edit_token_file

    try:
        with edit_token_file(file) as tokens:
            unknown = [name for name in names if name not in tokens]
            if unknown:
                raise ValueError(f"{file} has no token {', '.join(unknown)}; nothing was revoked")
            for name in names:
                if after:
                    tokens[name] = _ending(tokens[name], _when(after))
                else:
                    del tokens[name]
    except (ValueError, OSError) as error:
        _fail(error)
    typer.echo(f"{', '.join(names)}: {'expires in ' + after if after else 'revoked'}", err=True)


@app.command()
def check(
    file: File,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with nothing but a token, - for standard input, or "
            "$HICACHE_METADATA_TOKEN.",
        ),
    ] = None,
) -> None:
    """See that a server would take the file, and tell what one token is, if one is given. Exits
    with 1 if it is unknown or has expired."""
    from hicache_metadata_server.auth.token_file import digest, read_token_file, readable_by_all

    try:
        records = read_token_file(file)
        token = _given(token_file)
    except (ValueError, OSError) as error:
        _fail(error)
    if readable_by_all(file):
        typer.echo(f"{file} can be read by everybody on this machine: chmod o-r {file}", err=True)
    if not token:
        typer.echo(f"{len(records)} tokens")
        return
    wanted = digest(token.encode()).hex()
    found = next((record for record in records if record.sha256 == wanted), None)
    if found is None:
        typer.echo("unknown")
        raise typer.Exit(UNKNOWN)
    expired = found.expires is not None and found.expires <= datetime.now(UTC)
    typer.echo(f"{found.id}: {_described(found)}{', which is over' if expired else ''}")
    raise typer.Exit(UNKNOWN if expired else 0)


@app.command()
def convert(
    plain: Annotated[
        Path, typer.Argument(metavar="OLD", help="A file of lines `read|write|admin TOKEN`.")
    ],
    file: File,
) -> None:
    """Take over the tokens of a file that holds them in the clear; they stay valid. Delete that
    file then."""
    from hicache_metadata_server.auth.token_file import edit_token_file, read_plain_file

    try:
        records = read_plain_file(plain)
        with edit_token_file(file) as tokens:
            there = [record.id for record in records if record.id in tokens]
            if there:
                raise ValueError(
                    f"{file} has tokens {', '.join(there)} already; nothing was taken over"
                )
            tokens.update((record.id, record) for record in records)
    except (ValueError, OSError) as error:
        _fail(error)
    typer.echo(f"{len(records)} tokens taken over; now delete {plain}", err=True)


def _when(text: str) -> datetime:
    """A time from now, or a date at its beginning (UTC)."""
    span = _SPAN.fullmatch(text)
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        if span is not None:
            return now + timedelta(**{_UNITS[span[2]]: int(span[1])})
        when = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is neither a time such as 90d nor a date such as 2027-01-31"
        ) from None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    if when <= now:
        raise ValueError(f"{text} is over already")
    return when


def _ending(record: TokenRecord, when: datetime) -> TokenRecord:
    """The same token with its end at that time, or earlier if it had one."""
    return structs.replace(record, expires=min(when, record.expires or when))


def _described(record: TokenRecord) -> str:
    tenant = f" for tenant {record.tenant}" if record.tenant else ""
    expires = f", until {record.expires:%Y-%m-%d %H:%M}Z" if record.expires else ""
    return f"{record.right}{tenant}{expires}"


def _given(token_file: Path | None) -> str:
    if token_file is None:
        return os.environ.get("HICACHE_METADATA_TOKEN", "")
    return (sys.stdin.read() if str(token_file) == "-" else token_file.read_text("utf-8")).strip()


def _fail(error: Exception) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(Text(sentence(error), "red"))
    raise typer.Exit(FAILED)
