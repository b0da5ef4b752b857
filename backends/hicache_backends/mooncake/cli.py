"""The command `hicache mooncake`."""

from __future__ import annotations

import json
import signal
import threading
from typing import Annotated

import typer

from hicache_backends.mooncake.cluster import MAX_PORT, DevCluster
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
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="Port of the master; a free one if 0.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the driver's options as one line of JSON.")
    ] = False,
) -> None:
    """Start a master and stores on loopback, and stop exactly those on Ctrl-C or SIGTERM."""
    ended = threading.Event()
    try:
        cluster = DevCluster(stores, size_of(store_size, "--store-size"), port=port)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: ended.set())
        with cluster:
            options = " ".join(f"-c {name}={value}" for name, value in cluster.options.items())
            text = (
                f"master at {cluster.address}, {stores} stores of {store_size}\n"
                f"try: hicache doctor mooncake {options}"
            )
            print(json.dumps(cluster.options) if as_json else text, flush=True)
            ended.wait()
    except HiCacheError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
