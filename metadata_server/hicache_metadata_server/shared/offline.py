"""All scopes of a Redis that no server uses, for `hicache metadata fsck`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from hicache_metadata_server.core.changes import Recovered
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.shared.connection import open_connection
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.scope_log import (
    ScopeLog,
    ScopeLogStore,
    load,
    recovered,
    release,
)
from hicache_metadata_server.shared.scope_owner import BEAT_SECONDS, ScopeOwner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.core.restore import SlotRows


class OfflineScopes(ScopeLogStore):
    """A store that owns every scope until it is closed, and changes none.

    Args:
        url: address of Redis.

    Raises:
        StoreError: Redis is not reached, or servers use it.
        ValueError: the address is not valid.
    """

    def __init__(self, url: str) -> None:
        connection = open_connection(url)
        super().__init__(connection, time.time)
        self.redacted = connection.redacted
        self._owner = ScopeOwner(
            connection, MetadataService(shares_store=True), self, url="", now=time.time
        )
        self._rows: dict[int, Iterable[SlotRows]] = {}
        try:
            self._do(self._lock())
        except BaseException:
            super().close()
            raise

    def recover(self, now: float) -> Recovered:
        """Take every scope, and read everything but slots."""
        everything = Recovered()
        for name in sorted(self._owner.entries):
            self._read(self._do(self._owner.take_any(name)), now, everything)
        return everything

    def rows(self, scope: int) -> Iterable[SlotRows]:
        """Slots of a scope that was read."""
        return self._rows.pop(scope)

    def close(self) -> None:
        """Give the scopes back."""
        try:
            self._do(self._unlock())
        finally:
            super().close()

    # Implementation.

    async def _lock(self) -> None:
        # Durability is the servers' promise to their clients; an operator's command has none.
        await check_redis(self._connection, StoreDurability.NONE)
        await self._owner.poll()
        seen = {name: record.beat for name, record in self._owner.others().items()}
        # Servers that were killed have left their records; one that lives renews its own.
        while others := self._owner.others():
            for name, record in others.items():
                if record.beat != seen.get(name):
                    raise StoreError(
                        f"the server {record.url} uses {self.redacted}: name it by its address, or "
                        f"stop all servers"
                    )
            await asyncio.sleep(BEAT_SECONDS)
            await self._owner.poll()

    async def _unlock(self) -> None:
        await release(self._connection, self.logs())
        await self._owner.leave()

    def _read(self, log: ScopeLog, now: float, everything: Recovered) -> None:
        found, rows = recovered(log, self._do(load(self._connection, log.name, log.token)), now)
        if not found.scopes:
            return
        self.attach(log, found.pins)
        self._rows[log.number] = rows
        everything.scopes += found.scopes
        everything.pins += found.pins
        everything.answers += found.answers
        for name, ceiling in found.counters.items():
            everything.counters[name] = max(everything.counters.get(name, 0), ceiling)
