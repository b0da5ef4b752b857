"""The last removals of a storage, for several listeners with a cursor each."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from hicache_storage.objects.lifecycle import ForkAware
from hicache_storage.spec import Removal, RemovalReason, Removals

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from hicache_storage.objects.requests import RegisteredPool

MAX_REMOVALS = 65_536
"""Limit of the removals that are kept; a listener that is further behind is told so (`lost`)."""


@dataclass(frozen=True, slots=True)
class ObjectRemoval:
    """One object that a driver reports as removed."""

    namespace: str
    """Name of its namespace."""
    key: str
    reason: RemovalReason = RemovalReason.UNKNOWN
    seconds: float = 0.0
    """Time of the removal in seconds since 1970; 0 if it is not known."""
    by: str = ""
    """Process or server that has removed it; empty if it is not known."""


def this_process() -> str:
    """Name this process in removals."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class RemovalLog(ForkAware):
    """The last removals that a storage has learned of. Thread-safe.

    Cursors are numbers of entries. They begin at a random one, so that a cursor of another storage
    is out of range. What was lost takes a number, too.
    """

    def __init__(self) -> None:
        self._entries: deque[Removal | None] = deque(maxlen=MAX_REMOVALS)
        """None where removals may be missing."""
        self._end = 1 + (int.from_bytes(os.urandom(4), "little") << 20)
        """Number of the next entry."""
        self._namespaces = set[str]()
        """Those that the driver watches."""
        super().__init__()

    def begin_in_child(self) -> None:
        """Replace the locks, which threads of the parent may hold."""
        super().begin_in_child()
        # Held while the driver is asked, and taken before `_lock`.
        self._collecting = threading.Lock()

    @contextmanager
    def collecting(self, seconds: float | None) -> Generator[None]:
        """Keep other calls from asking the driver: its answers are added in their order.

        Raises:
            TimeoutError: another call asks it for longer than this.
        """
        if not self._collecting.acquire(timeout=-1 if seconds is None else seconds):
            raise TimeoutError("another call is still asking the store for removals")
        try:
            yield
        finally:
            self._collecting.release()

    def add(
        self, pools: Iterable[RegisteredPool], removed: Sequence[ObjectRemoval], *, lost: bool
    ) -> None:
        """Add the answer of a driver; `collecting` is held.

        Args:
            pools: those that it was asked for.
            removed: objects. A page in shards is taken once of them.
            lost: some may be missing.
        """
        homes = {part.namespace.name: pool for pool in pools for part in pool.parts}
        # Of a pool that was registered since the last call, the driver may have missed some.
        lost |= bool(self._namespaces) and not homes.keys() <= self._namespaces
        pages, in_shards = list[Removal](), set[tuple[str, str]]()
        for one in removed:
            if (pool := homes.get(one.namespace)) is None:
                continue
            if pool.shards:
                if (pool.name, one.key) in in_shards:
                    continue
                in_shards.add((pool.name, one.key))
            pages.append(Removal(pool.name, one.key, one.reason, one.seconds, one.by))
        with self._lock:
            self._append([*[None] * lost, *pages])
        self._namespaces.update(homes)

    def add_damaged(self, pool: RegisteredPool, keys: Sequence[str]) -> None:
        """Add pages that were found damaged, and that lookups of this storage alone do not find."""
        if self._namespaces:
            now, by = time.time(), this_process()
            with self._lock:
                self._append(
                    [Removal(pool.name, key, RemovalReason.DAMAGED, now, by) for key in keys]
                )

    def since(self, cursor: int | None) -> Removals:
        """Return the entries from a cursor on; without one, none."""
        with self._lock:
            end = self._end
            behind = 0 if cursor is None else end - cursor
            kept = len(self._entries)
            lost = not 0 <= behind <= kept
            entries = list(islice(self._entries, 0 if lost else kept - behind, None))
        return Removals([one for one in entries if one], end, lost or None in entries)

    def _append(self, entries: Sequence[Removal | None]) -> None:
        self._entries.extend(entries)
        self._end += len(entries)
