"""Where a snapshot is put: what each kind of store must offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_metadata_server.backup.parts import SnapshotError, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.backup.parts import SnapshotPart


class SnapshotTarget(Protocol):
    """A store that no server has open, and that nobody else opens before `close`.

    Until `keep` it is, for whoever opens it after a crash, as it was, or empty.
    """

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """Write a whole snapshot aside, in the order in which it comes.

        Raises:
            StoreError: it cannot be written.
        """
        ...

    def read_back(self) -> tuple[Tally, list[str]]:
        """What was written, as a server would take it over: a tally of it, and what contradicts
        itself.

        Raises:
            StoreError: it cannot be read.
        """
        ...

    def commit(self) -> None:
        """What was written takes the place of what the store had.

        Raises:
            StoreError: it could not be done.
        """
        ...

    def close(self) -> None:
        """Let go of the store; what was written and not kept is removed."""
        ...


def open_target(url: str, *, replace: bool) -> SnapshotTarget:
    """The store at an address, to be filled.

    Raises:
        ValueError: the address is not the address of a store that can be filled.
        StoreError: a server has it.
        SnapshotError: it holds something, and may not be replaced.
    """
    from hicache_metadata_server.shared.address import is_shared
    from hicache_metadata_server.storage.store import SQLITE

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
    """Load a snapshot and see that the store holds just that. It is not kept yet.

    Raises:
        SnapshotError: it holds something else, or contradicts itself.
        StoreError: it cannot be written or read.
    """
    tally = Tally()
    target.load(tally.over(parts))
    found, problems = target.read_back()
    problems += tally.differences(found)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise SnapshotError(
            f"what was written is not what was read: {problems[0]}{more}; nothing has changed"
        )
    return tally
