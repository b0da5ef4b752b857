"""`hicache doctor`: diagnosis of drivers and their environment, with remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from hicache_storage.spec import parse_bytes
from hicache_storage.tools.doctor import DoctorTarget, Finding, Status, examine
from hicache_storage.tools.options import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

STYLES: Final = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
PASSED, FAILED, USAGE_ERROR = 0, 1, 2


def doctor(
    driver: Annotated[
        str | None,
        typer.Argument(metavar="DRIVER", help="Examine this driver too, and open its storage."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", "-c", metavar="KEY=VALUE", help="An option of the driver; may be repeated."
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a call or a connection may take.")
    ] = 5.0,
    pinned: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory that the engine will lock, such as 64GiB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this environment and, with DRIVER, its package, options and a round trip.

    With -c the store that those options name is opened; without, a throwaway one. Pages stored on
    the way are removed. Exits with 0 if nothing failed, 1 if something did, 2 for bad arguments.
    """
    try:
        options = parse_pairs(config or [])
        if options and driver is None:
            raise ValueError("-c needs a DRIVER to be given to")
        target = DoctorTarget(
            driver=driver,
            options=options,
            deadline_seconds=deadline,
            pinned_bytes=None if pinned is None else parse_bytes(pinned),
        )
    except ValueError as error:
        Console(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(USAGE_ERROR) from error
    # Printed as they come: one check may take two deadlines.
    findings = list(examine(target)) if as_json else list(_printed(examine(target)))
    passed = all(finding.status is not Status.FAIL for finding in findings)
    if as_json:
        # `print`, because rich would wrap the text and read brackets in it as markup.
        print(
            msgspec.json.format(
                msgspec.json.encode(
                    {"schema": 1, "driver": driver, "ok": passed, "findings": findings}
                )
            ).decode()
        )
    raise typer.Exit(PASSED if passed else FAILED)


def _printed(findings: Iterator[Finding]) -> Iterator[Finding]:
    console, counts = Console(highlight=False), dict.fromkeys(Status, 0)
    for finding in findings:
        counts[finding.status] += 1
        label = Text(f"{finding.status:<4}", STYLES[finding.status])
        console.print(
            Text.assemble(label, "  ", (finding.check, "bold"), "  ", finding.detail),
            # Not wrapped by rich: commands are copied from these lines.
            soft_wrap=True,
        )
        if finding.fix:
            console.print(Text.assemble("      fix: ", (finding.fix, "cyan")), soft_wrap=True)
        yield finding
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
