"""Stores in Redis as targets of snapshots, while no server uses them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_metadata_server.backup.offline import snapshot_of
from hicache_metadata_server.backup.sqlite import changes_of_snapshot
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.invariants import audit
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.snapshot_parts import Tally
from hicache_metadata_server.shared.offline import OfflineScopes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart


class RedisTarget:
    """One Redis as the target of a snapshot.

    Its new scopes enter the map of scopes, and thereby exist for servers, at `commit`. With
    `replace` the old ones are removed when `load` begins.

    Raises:
        StoreError: Redis is not reached, or servers use it.
        SnapshotError: it holds scopes, and `replace` is false.
        ValueError: the address is not valid.
    """

    def __init__(self, url: str, *, replace: bool) -> None:
        self._store = OfflineScopes(url, publishes=False)
        try:
            if self._store.names and not replace:
                raise SnapshotError(
                    f"{self._store.redacted} holds scopes already; --replace replaces them"
                )
        except BaseException:
            self._store.close()
            raise

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """Remove the old scopes, and write the new ones to their logs."""
        # Removed first rather than last: two copies may not fit into the memory of Redis.
        self._store.remove(self._store.names)
        for changes in changes_of_snapshot(parts):
            self._store.write(changes)

    def read_back(self) -> tuple[Tally, list[str]]:
        """Read the new scopes as a server does; audit them."""
        tally, now = Tally(), time.time()
        service = MetadataService(durability=self._store.durability)
        service.restore(self._store.read_again(now), self._store.rows, now)
        for _ in tally.over(snapshot_of(service, now)):
            pass
        problems = list(service.recovery_problems)
        for name, scope in service.scopes.items():
            problems += [f"{name}: {problem}" for piece in audit(scope) for problem in piece]
        return tally, problems

    def commit(self) -> None:
        """Enter the scopes into the map."""
        self._store.publish()

    def close(self) -> None:
        """Remove scopes that were not committed, and close the connection."""
        self._store.close()
