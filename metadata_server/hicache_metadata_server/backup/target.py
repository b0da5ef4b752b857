"""Targets of snapshots: the interface that each kind of store implements, and how one is filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.snapshot_parts import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart


class SnapshotTarget(Protocol):
    """A store that no server has open, locked until `close`.

    A crash before `commit` leaves it as it was, or empty.
    """

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """Write a whole snapshot, invisible to servers, in the order of the stream.

        Raises:
            StoreError: the snapshot cannot be written.
        """
        ...

    def read_back(self) -> tuple[Tally, list[str]]:
        """Recover the written snapshot as a server would; return its tally and its problems.

        Raises:
            StoreError: the snapshot cannot be read.
        """
        ...

    def commit(self) -> None:
        """Replace the content of the store by the written snapshot.

        Raises:
            StoreError: the content was not replaced.
        """
        ...

    def close(self) -> None:
        """Release the store; remove a snapshot that was not committed."""
        ...


def open_target(url: str, *, replace: bool) -> SnapshotTarget:
    """Open the store at an address as a target.

    Raises:
        ValueError: the address is not that of a store that can be filled.
        StoreError: a server has the store open.
        SnapshotError: the store holds scopes, and `replace` is false.
    """
    # Imported here: each kind of store needs its own library.
    from hicache_metadata_server.storage.address import is_shared
    from hicache_metadata_server.storage.factory import SQLITE

    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        from hicache_metadata_server.backup.sqlite import SqliteTarget

        return SqliteTarget(url.removeprefix(SQLITE), replace=replace)
    if is_shared(url):
        from hicache_metadata_server.backup.redis import RedisTarget

        return RedisTarget(url, replace=replace)
    raise ValueError(
        f"{url!r} is not the address of a store that can be filled; {SQLITE}FILE and "
        f"redis://HOST:PORT/DB do"
    )


def fill(target: SnapshotTarget, parts: Iterable[SnapshotPart]) -> Tally:
    """Load a snapshot, and verify that the store holds exactly that. Does not commit.

    Raises:
        SnapshotError: the store holds something else, or contradicts itself.
        StoreError: the store cannot be written or read.
    """
    tally = Tally()
    target.load(tally.over(parts))
    # Read back through the code that a server starts with: a snapshot that a server could not
    # recover must not replace one that it can.
    found, problems = target.read_back()
    problems += tally.differences(found)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise SnapshotError(
            f"what was written is not what was read: {problems[0]}{more}; nothing has changed"
        )
    return tally
