"""Registers the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, HungReads, RemovalScope, Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.MACHINE,
    deletes=True,
    clears=True,
    evicts=True,
    removals=RemovalScope.STORE,
    # Before the mount is known: a read is guarded, and waited for.
    hung_reads=HungReads.BOUNCE_BUFFER,
)
"""With every option that takes none away."""


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    """Offer the driver `file`."""
    return [
        DriverSpec(
            name="file",
            target="hicache_backends.file.driver:FileStorage",
            config="hicache_backends.file.config:FileConfig",
            capabilities=CAPABILITIES,
            summary="Files in a directory, local or on a mount that many nodes share",
            # What is tried out evicts for its capacity alone, whatever others leave on this disk.
            trial_config={"path": "{tmp}/store", "min_free": "0"},
            capacity_option="capacity",
        )
    ]
