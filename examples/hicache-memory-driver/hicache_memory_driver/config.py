"""Options of the driver."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hicache_storage.spec import DriverConfig


class MemoryConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the driver `memory`."""

    store: Annotated[str, Meta(description="Storages that name the same store see the same pages.")] = "default"
