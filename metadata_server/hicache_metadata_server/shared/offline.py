"""All scopes of a Redis that no server uses, as the store of one process.

For commands: import, fsck, backup, copy and restore.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_metadata_server.core.changes import Changes, Recovered
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.shared.assembly import open_connection
from hicache_metadata_server.shared.ownership import ScopeEntry
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.scope_log import (
    ScopeLog,
    ScopeLogStore,
    load,
    recovered,
    release,
    remove,
    take,
)
from hicache_metadata_server.shared.scope_owner import BEAT_SECONDS, ScopeOwner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.core.restore import SlotRows


class OfflineScopes(ScopeLogStore):
    """A store that owns every scope until it is closed.

    Args:
        url: address of Redis.
        publishes: new scopes exist for servers once they are written; otherwise with `publish`, and
            are removed without it.

    Raises:
        StoreError: Redis is not reached, or servers use it.
        ValueError: the address is not valid.
    """

    def __init__(self, url: str, *, publishes: bool = True) -> None:
        connection = open_connection(url)
        super().__init__(connection, time.time)
        self.redacted = connection.redacted
        self._publishes = publishes
        self._owner = ScopeOwner(
            connection, MetadataService(shares_store=True), self, url="", now=time.time
        )
        self._new: dict[int, ScopeEntry] = {}
        self._rows: dict[int, Iterable[SlotRows]] = {}
        try:
            self._do(self._lock())
        except BaseException:
            super().close()
            raise

    @property
    def names(self) -> list[str]:
        """Scopes in the store."""
        return sorted(self._owner.entries)

    def recover(self, now: float) -> Recovered:
        """Take every scope, and read everything but slots."""
        everything = Recovered()
        for name in self.names:
            self._read(self._do(self._taken(name)), now, everything)
        return everything

    def read_again(self, now: float) -> Recovered:
        """Read the scopes that were written."""
        everything = Recovered()
        for log in self.logs():
            again = ScopeLog(log.name, log.number, log.token, log.seq, 0.0)
            self._read(again, now, everything)
        return everything

    def rows(self, scope: int) -> Iterable[SlotRows]:
        """Slots of a scope that was read."""
        return self._rows.pop(scope)

    def write(self, changes: Changes) -> None:
        """Append to the logs; a new scope gets one."""
        for record in changes.scopes:
            if record.number not in (log.number for log in self.logs()):
                self.attach(self._do(self._created(record.geometry.scope, record.number)))
                self._new[record.number] = ScopeEntry(
                    record.geometry, "", record.geometry.scope, record.tenant
                )
        dropped = [log.name for log in self.logs() if log.number in changes.dropped]
        super().write(changes)
        if dropped:
            self._do(self._owner.forget(dropped))
        if changes.counters and not (changes.scopes or changes.slots):
            # Numbers that were given for all scopes: each log has them of its own.
            records = [(log.record, log.number) for log in self.logs()]
            super().write(
                Changes(scopes=[replace(one, number=number) for one, number in records if one])
            )
        if self._publishes:
            self.publish()

    def publish(self) -> None:
        """Let servers serve the new scopes."""
        entries = {entry.geometry.scope: entry for entry in self._new.values()}
        if entries:
            self._do(self._owner.publish(entries))
        self._new = {}

    def remove(self, names: Iterable[str]) -> None:
        """Remove scopes, also those that cannot be read."""
        for name in names:
            log = self._do(self._taken(name))
            self._do(remove(self._connection, log))
            self._do(self._owner.publish({name: None}))

    def close(self) -> None:
        """Give the scopes back, and remove new ones that were not published."""
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
        for log in self.logs():
            if log.number in self._new:
                await remove(self._connection, log)
            else:
                await release(self._connection, [log])
        await self._owner.leave()

    async def _taken(self, name: str) -> ScopeLog:
        return await self._owner.take_any(name)

    async def _created(self, name: str, number: int) -> ScopeLog:
        token, head = await take(self._connection, name, b"", self._owner.incarnation.id)
        if not token:
            # Left by a command that was cut short: the map does not have the scope.
            log = await self._owner.take_any(name)
            await remove(self._connection, log)
            return await self._created(name, number)
        return ScopeLog(name, number, token, head.seq, 0.0, head.seq)

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
