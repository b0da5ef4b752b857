"""Entry point of `hicache`: the SDK's commands, and those of installed packages."""

from __future__ import annotations

import io
import sys
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import typer

COMMAND_GROUP: Final = "hicache_storage.commands"
"""Entry-point group; the value is a `typer.Typer`, the name becomes the command."""
OWN_COMMANDS: Final = ("bench", "demo", "doctor", "drivers", "new", "why")
"""The SDK's own, which no package's command of that name hides."""
ENVIRONMENT_ERROR: Final = 2


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name or a border may have characters that the locale has not.
        sys.stdout.reconfigure(errors="replace")
    try:
        # The packages of the extra `cli` are imported in there: the SDK installs without them.
        commands = app(*sys.argv[1:2])
    except ImportError as error:
        sys.exit(
            f"the command line needs more packages: pip install 'hicache-storage[cli]' ({error})"
        )
    try:
        commands()
    except OSError as error:
        # Such as no temporary directory that can be written, or a file that cannot.
        print(f"hicache: {error}", file=sys.stderr)
        sys.exit(ENVIRONMENT_ERROR)


def app(name: str = "") -> typer.Typer:
    """Return the command of that name alone, if an installed package brings it, or else all commands.

    One package's command starts in half of the time of all. A package whose commands are broken is
    named on standard error; the others are there.

    Raises:
        ImportError: the packages of the extra `cli` are not installed.
    """
    import typer

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"hicache-storage {version('hicache-storage')}")
            raise typer.Exit

    # Eager: it ends before typer complains that no command was given.
    shown = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version and end."
    )

    def root(_version: bool = shown) -> None:
        """Drivers and tools for KV caches outside the GPU."""

    commands = typer.Typer(
        name="hicache",
        help="Drivers and tools for KV caches outside the GPU.",
        no_args_is_help=True,
        add_completion=False,
    )
    commands.callback()(root)
    # Sorted, so that the help does not depend on the order of the installed packages.
    points = sorted(entry_points(group=COMMAND_GROUP), key=lambda point: point.name)
    named = [point for point in points if point.name == name and name not in OWN_COMMANDS]
    if not named:
        _add_own(commands)
    for point in named or points:
        try:
            commands.add_typer(point.load(), name=point.name)
        except Exception as error:  # noqa: BLE001 - a broken command of one package must not take the others away
            print(
                f"hicache: command {point.name!r} of {point.value} is broken: {error}",
                file=sys.stderr,
            )
    return commands


def _add_own(commands: typer.Typer) -> None:
    """Add the SDK's commands."""
    from hicache_storage.cli.bench import bench
    from hicache_storage.cli.demo import demo
    from hicache_storage.cli.doctor import EngineCommandLine, doctor
    from hicache_storage.cli.drivers import drivers
    from hicache_storage.cli.new import new
    from hicache_storage.cli.why import why

    for command in (demo, drivers, new, bench):
        commands.command()(command)
    commands.command(cls=EngineCommandLine)(doctor)
    commands.command(cls=EngineCommandLine)(why)


if __name__ == "__main__":
    main()
