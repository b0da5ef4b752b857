"""Entry point of `hicache`: the SDK's own commands, and those of every installed package that brings some."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Final

COMMAND_GROUP: Final = "hicache_storage.commands"
"""Entry-point group; the value is a `typer.Typer`, the name becomes the command."""


def main() -> None:
    """Run the command line."""
    try:
        import typer
    except ImportError:
        sys.exit("the command line needs two more packages: pip install 'hicache-storage[cli]'")
    from hicache_storage.cli.bench import bench
    from hicache_storage.cli.doctor import doctor
    from hicache_storage.cli.drivers import drivers
    from hicache_storage.cli.metrics import metrics
    from hicache_storage.cli.new import new
    from hicache_storage.cli.root import root

    app = typer.Typer(
        name="hicache", help="Drivers and tools for KV caches outside the GPU.", no_args_is_help=True, add_completion=False
    )
    app.callback()(root)
    for command in (drivers, new, doctor, bench):
        app.command()(command)
    app.add_typer(metrics, name="metrics")
    for point in sorted(entry_points(group=COMMAND_GROUP), key=lambda point: point.name):
        try:
            app.add_typer(point.load(), name=point.name)
        except Exception as error:  # noqa: BLE001 - a broken command of one package must not take the others away
            print(f"hicache: command {point.name!r} of {point.value} is broken: {error}", file=sys.stderr)
    app()


if __name__ == "__main__":
    main()
