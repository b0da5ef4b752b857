"""`hicache metadata token`: create, list and revoke the tokens of a server.

The file holds digests of tokens, not the tokens: `new` is the only command that can print one.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table

from hicache_metadata_server.cli.options import exit_on_error

app = typer.Typer(
    help="Manage the tokens of a server, in a file that holds their digests.", no_args_is_help=True
)

UNKNOWN: Final = 1
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN: Final = re.compile(r"([0-9]{1,6})([mhdw])", re.ASCII)

File = Annotated[
    Path,
    typer.Option(
        "--file", metavar="FILE", help="File of the tokens.", envvar="HICACHE_METADATA_TOKEN_FILE"
    ),
]


@app.command()
def new(
    file: File,
    right: Annotated[
        Literal["read", "write", "admin"],
        typer.Option(help="Right of the token: read, write (and read), or admin (all)."),
    ],
    name: Annotated[
        str, typer.Option("--id", help="Id of the token in logs; random by default.")
    ] = "",
    tenant: Annotated[
        str, typer.Option(help="Tenant whose scopes it gives access to; none by default.")
    ] = "",
    expires: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="Expiry: after a time such as 12h or 90d, or at a date such as 2027-01-31.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the token to this new file, readable by its owner only; do not print it.",
        ),
    ] = None,
) -> None:
    """Add a token, and print it or write it into a file: it is kept nowhere else."""
    from hicache_metadata_server.auth.files import edit_token_file, new_file, new_token, record_of

    token = new_token()
    with (
        exit_on_error(),
        edit_token_file(file) as tokens,
        new_file(output) if output else nullcontext() as copy,
    ):
        if copy is not None:
            copy.write(f"{token}\n".encode())
        record = record_of(
            token, right, name=name, tenant=tenant, expires=_when(expires) if expires else None
        )
        if record.id in tokens:
            raise ValueError(f"{file} has a token {record.id} already")
        tokens[record.id] = record
    where = f"the token is in {output}" if output else "the token is shown only once"
    whose = f" for tenant {record.tenant}" if record.tenant else ""
    until = f", until {record.expires:%Y-%m-%d %H:%M}Z" if record.expires else ""
    typer.echo(f"{record.id}: {record.right}{whose}{until}; {where}", err=True)
    # Alone on standard output, so that a script can capture it; all else goes to standard error.
    if output is None:
        typer.echo(token)


@app.command("list")
def list_tokens(
    file: File,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Only the token in this file, which contains nothing else."
        ),
    ] = None,
) -> None:
    """List the tokens with their rights, tenants and expiry.

    Exits with 2 if a server would refuse the file, and with 1 if a given token is unknown or has
    expired.
    """
    from hicache_metadata_server.auth.files import digest, read_token_file, readable_by_all

    with exit_on_error():
        records = read_token_file(file)
        if token_file is not None:
            wanted = digest(token_file.read_text("utf-8").strip().encode()).hex()
            records = [record for record in records if record.sha256 == wanted]
    if readable_by_all(file):
        typer.echo(f"{file} can be read by everybody on this machine: chmod o-r {file}", err=True)
    now = datetime.now(UTC)
    table = Table(
        "id", "right", "tenant", "created", "expires", box=None, header_style="bold", pad_edge=False
    )
    valid = 0
    for record in records:
        expires = "never" if record.expires is None else f"{record.expires:%Y-%m-%d %H:%M}Z"
        gone = record.expires is not None and record.expires <= now
        valid += not gone
        table.add_row(
            record.id,
            record.right,
            record.tenant,
            f"{record.created:%Y-%m-%d}",
            f"{expires}, expired" if gone else expires,
        )
    Console(highlight=False, soft_wrap=True).print(table)
    raise typer.Exit(UNKNOWN if token_file is not None and not valid else 0)


@app.command()
def revoke(
    names: Annotated[list[str], typer.Argument(metavar="ID", help="Ids of tokens.")],
    file: File,
    after: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Let them expire after a time such as 24h instead of now."
        ),
    ] = "",
) -> None:
    """End tokens; running servers know it within a second or two."""
    from hicache_metadata_server.auth.files import edit_token_file

    with exit_on_error(), edit_token_file(file) as tokens:
        unknown = [name for name in names if name not in tokens]
        if unknown:
            raise ValueError(f"{file} has no token {', '.join(unknown)}; nothing was revoked")
        until = _when(after) if after else None
        for name in names:
            if until is None:
                del tokens[name]
            else:
                # To revoke a token must never prolong it.
                ends = min(until, tokens[name].expires or until)
                tokens[name] = structs.replace(tokens[name], expires=ends)
    typer.echo(f"{', '.join(names)}: {'expires in ' + after if after else 'revoked'}", err=True)


def _when(text: str) -> datetime:
    """Parse a time from now, or a date, of which the beginning (UTC) counts."""
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
        raise ValueError(f"{text} is in the past")
    return when
