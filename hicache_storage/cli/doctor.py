"""`hicache doctor`: diagnosis of drivers and their environment, with remedies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from hicache_storage.tools.doctor import DoctorTarget, Finding, Role, Status
from hicache_storage.tools.options import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

STYLES: Final = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
PASSED, FAILED, USAGE_ERROR = 0, 1, 2
ENGINES: Final = ("vllm", "lmcache")
"""Engines whose command lines are checked."""
KNOWN_ENGINES: Final = (*ENGINES, "sglang")
"""Engines whose command lines are read."""
DriverOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="KEY=VALUE", help="An option of the driver; may be repeated."
    ),
]
OWN_OPTIONS: Final = frozenset({"--json", "--deadline", "--role", "--verbose"})
"""Options of this command that no engine has."""


class EngineCommandLine(TyperCommand):
    """Leaves what stands behind an engine's name to that engine: both have an option `--config`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        behind = next((at for at, word in enumerate(args, 1) if word in KNOWN_ENGINES), None)
        return super().parse_args(
            ctx, args if behind is None else [*args[:behind], "--", *args[behind:]]
        )


def doctor(
    driver: Annotated[
        str | None,
        typer.Argument(
            metavar="DRIVER",
            help="Examine this driver too, and open its storage; or an engine, vllm or lmcache.",
        ),
    ] = None,
    command_line: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND_LINE",
            help="What starts the engine, such as `serve MODEL --kv-transfer-config JSON`; or the "
            "JSON alone.",
        ),
    ] = None,
    config: DriverOptions = None,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a call or a connection may take.")
    ] = 5.0,
    role: Annotated[
        Role | None,
        typer.Option(
            help="For whom: what an engine needs of its machine, what a driver's author has to "
            "mend, or who runs the store. By default author for a throwaway store, else engine."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print what is in order, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this environment and, with DRIVER, its package, options and a round trip.

    With -c the store that those options name is opened; without, a throwaway one. Pages stored on
    the way are removed. With the name of an engine, in front of the command that starts it, its
    version, keys and the options of its bridge are checked, and then the driver that these
    name; options of doctor stand before the engine's name. Exits with 0 if nothing failed, 1 if
    something did, 2 for bad arguments.
    """
    # Here, so that `hicache --help` does not import all checks.
    from hicache_storage.tools.doctor.examination import examine

    try:
        target = _target(driver, command_line or [], config or [])
        throwaway = target.driver is not None and not target.options and not target.engine
        chosen = role or (Role.AUTHOR if throwaway else Role.ENGINE)
        target = replace(target, deadline_seconds=deadline, role=chosen)
    except ValueError as error:
        Console(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(USAGE_ERROR) from error
    # Printed as they come: one check may take two deadlines.
    findings = list(examine(target)) if as_json else list(_printed(examine(target), verbose))
    passed = all(finding.status is not Status.FAIL for finding in findings)
    if as_json:
        # `print`, because rich would wrap the text and read brackets in it as markup.
        answer = {
            "schema": 1,
            "driver": target.driver,
            "engine": target.engine or None,
            "ok": passed,
            "findings": findings,
        }
        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
    raise typer.Exit(PASSED if passed else FAILED)


def _target(name: str | None, command_line: list[str], pairs: list[str]) -> DoctorTarget:
    """Return the target of the arguments.

    Raises:
        ValueError: they do not go together.
    """
    if name not in ENGINES:
        if command_line:
            raise ValueError(
                f"{command_line[0]!r}: a command line goes with {' or '.join(ENGINES)}"
            )
        if pairs and name is None:
            raise ValueError("-c needs a DRIVER to be given to")
        return DoctorTarget(driver=name, options=dict(parse_pairs(pairs)))
    if pairs:
        raise ValueError(f"-c is an option of drivers; {name} has its options in its command line")
    for word in command_line:
        if word.partition("=")[0] in OWN_OPTIONS:
            raise ValueError(f"put {word} before {name}: what follows is {name}'s own")
    from hicache_storage.tools.doctor.examination import with_engines_driver

    return with_engines_driver(DoctorTarget(engine=name, command_line=command_line))


def _printed(findings: Iterator[Finding], verbose: bool) -> Iterator[Finding]:
    console, counts = Console(highlight=False), dict.fromkeys(Status, 0)
    for finding in findings:
        counts[finding.status] += 1
        yield finding
        # What was measured is what a sound store is examined for.
        if (
            not verbose
            and finding.status is Status.OK
            and not finding.check.endswith(": round trip")
        ):
            continue
        label = Text(f"{finding.status:<4}", STYLES[finding.status])
        console.print(
            Text.assemble(label, "  ", (finding.check, "bold"), "  ", finding.detail),
            # Not wrapped by rich: commands are copied from these lines.
            soft_wrap=True,
        )
        if finding.fix:
            console.print(Text.assemble("      fix: ", (finding.fix, "cyan")), soft_wrap=True)
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
