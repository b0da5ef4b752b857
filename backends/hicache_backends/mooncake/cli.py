"""The command `hicache mooncake`."""

from __future__ import annotations

import json
import signal
import threading
from typing import Annotated

import typer

from hicache_backends.mooncake.cluster import DevCluster
from hicache_backends.mooncake.config import size_of
from hicache_storage.spec import HiCacheError

app = typer.Typer(help="Mooncake clusters on this machine.", no_args_is_help=True)


@app.callback()
def _mooncake() -> None:
    """Mooncake clusters on this machine."""


@app.command("dev-cluster")
def dev_cluster(
    stores: Annotated[int, typer.Option(min=1, help="Store processes.")] = 1,
    store_size: Annotated[
        str, typer.Option(help="Memory that each lends, such as '1gb'.")
    ] = "256mb",
    port: Annotated[int, typer.Option(help="Port of the master; a free one if 0.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the driver's options as one line of JSON.")
    ] = False,
) -> None:
    """Start a master and stores on loopback, and stop exactly those on Ctrl-C or SIGTERM."""
    ended = threading.Event()

    def end(_number: int, _frame: object) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        with DevCluster(stores, size_of(store_size, "--store-size"), port=port) as cluster:
            if as_json:
                print(json.dumps(cluster.options), flush=True)
            else:
                options = " ".join(f"-c {name}={value}" for name, value in cluster.options.items())
                print(
                    f"master at {cluster.address}, {stores} stores of {store_size}\ntry: hicache "
                    f"doctor mooncake {options}",
                    flush=True,
                )
            ended.wait()
    except HiCacheError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
