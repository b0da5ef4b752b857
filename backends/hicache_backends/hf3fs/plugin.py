"""Registration of the driver `hf3fs`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, HungReads, RemovalScope, Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPABILITIES: Final = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.PROCESS,
    deletes=True,
    clears=True,
    evicts=True,
    removals=RemovalScope.STORE,
    networked=True,
    hung_reads=HungReads.BOUNCE_BUFFER,
)
"""On a store that many nodes share; an open storage knows its own."""

_COMMAND_LINE = "from hicache_storage.cli.main import main; main()"


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    """Register the driver `hf3fs`."""
    return [
        DriverSpec(
            name="hf3fs",
            target="hicache_backends.hf3fs.driver:Hf3fsStorage",
            config="hicache_backends.hf3fs.config:Hf3fsConfig",
            capabilities=CAPABILITIES,
            summary="Slots of large files on 3FS, or any file system that all nodes see, mapped by "
            "a metadata server",
            # Small, because tools that examine a trial store may read whole files.
            trial_config={
                "path": "{tmp}/store",
                "metadata_url": "http://127.0.0.1:{port:meta}",
                "file_size": "64MiB",
                # Short, because the keys of a killed writer can be set again when a lease has ended,
                # and long enough for a machine that is busy.
                "lease_seconds": "2",
                "wait_seconds": "3",
            },
            trial_services=(
                (
                    *(sys.executable, "-c", _COMMAND_LINE, "metadata", "serve"),
                    *("--port", "{port:meta}", "--store", "sqlite:///{tmp}/meta.db"),
                    # A restored server waits for ten times its own duration of a lease.
                    *("--quarantine-seconds", "0.02", "--lease-seconds", "1"),
                ),
            ),
            capacity_option="file_size",
        )
    ]
