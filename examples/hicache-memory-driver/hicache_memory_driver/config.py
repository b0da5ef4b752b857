"""Options of the driver."""

from __future__ import annotations

from typing import Annotated

from hicache_storage.spec import DriverConfig
from msgspec import Meta


class MemoryConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the driver `memory`."""

    store: Annotated[
        str, Meta(description="Storages that name the same store see the same pages.")
    ] = "default"
