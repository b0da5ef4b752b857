"""Options of the driver."""

from __future__ import annotations

from typing import Annotated

from hicache_storage.spec import ConfigError, DriverConfig, Durability, parse_bytes
from msgspec import Meta


class RedisConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the driver `redis`."""

    url: Annotated[str, Meta(description="Address of the Redis: redis://HOST:PORT/DB.")]
    prefix: Annotated[
        str,
        Meta(
            pattern="^[A-Za-z0-9_.-]+$",
            description="First part of all keys. Storages of one prefix see the same pages.",
        ),
    ] = "hicache"
    capacity: Annotated[
        int | str,
        Meta(description="Bytes of all pages of the prefix, such as 64GiB; 0 for no limit."),
    ] = 0
    durability: Annotated[
        Durability,
        Meta(
            description="What the Redis is set up to survive: process with `appendonly yes` and "
            "`appendfsync always`, else reopen."
        ),
    ] = Durability.REOPEN
    timeout_seconds: Annotated[
        float, Meta(gt=0, description="How long a connection, or an answer, may take.")
    ] = 2.0
    connections: Annotated[
        int, Meta(ge=1, description="Open at most. Calls beyond them wait for one.")
    ] = 8

    @property
    def capacity_bytes(self) -> int:
        """The capacity in bytes; 0 for no limit."""
        try:
            return parse_bytes(self.capacity)
        except ValueError as error:
            raise ConfigError(f"capacity: {error}") from error
