"""Registers the driver. Imported whenever drivers are listed, so it imports nothing heavy."""

from __future__ import annotations

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import Capabilities, Durability, Sharing

CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESS,
    durability=Durability.REOPEN,
    deletes=True,
    clears=True,
    may_hang=False,
)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    return [
        DriverSpec(
            name="memory",
            target="hicache_memory_driver.driver:MemoryStorage",
            config="hicache_memory_driver.config:MemoryConfig",
            capabilities=CAPABILITIES,
            summary="pages in the memory of this process",
        )
    ]
