"""Filters of snapshots: each yields a stream without some of its pages or scopes.

The slot of a removed page stays in the stream, as an empty one with its generation: the generation
must not be given to another page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_metadata_server.backup.page_checks import defects_of
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.snapshot_parts import Counters, EmptySlots, Pages, ScopeHeader

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Container, Iterable, Iterator

    from hicache_metadata_server.backup.page_checks import PageChecker
    from hicache_metadata_server.core.snapshot_parts import SnapshotPart

LEAP: Final = 1 << 40
"""Gap behind the counters of a backup: more numbers than a server can have given since."""


def verifiable(parts: Iterable[SnapshotPart], dropped: Counter[str]) -> Iterator[SnapshotPart]:
    """Leave out pages without a checksum.

    Their slots may have been overwritten since the backup, and no reader can detect it.
    """
    for part in parts:
        if not isinstance(part, Pages):
            yield part
            continue
        kept, gone = part.partition([checksum != 0 for checksum in part.checksums].__getitem__)
        dropped["written without a checksum"] += len(gone)
        yield emptied(gone)
        yield kept


def restored(parts: Iterable[SnapshotPart], until: float) -> Iterator[SnapshotPart]:
    """Adapt an old snapshot to the time that has passed since.

    Counters jump, so that no number is given twice. Empty slots are quarantined until `until`: a
    writer may hold a lease on them that is younger than the backup.
    """
    for part in parts:
        match part:
            case Counters():
                yield Counters(part.lease + LEAP, part.pin + LEAP)
            case EmptySlots():
                yield msgspec.structs.replace(part, until=[until] * len(part))
            case _:
                yield part


def only_intact(
    parts: Iterable[SnapshotPart], checker: PageChecker, dropped: Counter[str]
) -> Iterator[SnapshotPart]:
    """Leave out pages whose slots do not hold them; keep scopes of other directories."""
    # A scope of another directory cannot be judged here. To keep it is safe: its pages have
    # checksums (`verifiable`), which every reader compares.
    name, is_here = "", False
    for part in parts:
        if isinstance(part, ScopeHeader):
            name = part.geometry.scope
            is_here = checker.open_scope(part.geometry)
        if not isinstance(part, Pages) or not is_here:
            yield part
            continue
        reasons = defects_of(checker, name, part)
        dropped.update(filter(None, reasons))
        kept, gone = part.partition([not reason for reason in reasons].__getitem__)
        yield kept
        yield emptied(gone)


def without(
    parts: Iterable[SnapshotPart], removed: Container[tuple[str, int]]
) -> Iterator[SnapshotPart]:
    """Leave out the pages in some slots of some scopes."""
    name = ""
    for part in parts:
        if isinstance(part, ScopeHeader):
            name = part.geometry.scope
        if not isinstance(part, Pages):
            yield part
            continue
        kept, gone = part.partition(
            [(name, slot) not in removed for slot in part.slots].__getitem__
        )
        yield kept
        yield emptied(gone)


def without_scopes(
    parts: Iterable[SnapshotPart], names: Collection[str], dropped: Counter[str]
) -> Iterator[SnapshotPart]:
    """Leave out whole scopes, with their slots; a client that uses one later creates it anew.

    In stores with one lease counter for all scopes the numbers go on. A shared store counts the
    leases of each scope, from 1.

    Raises:
        SnapshotError: at the end of the stream, for a scope that was not in it.
    """
    missing, name = set(names), ""
    for part in parts:
        if isinstance(part, ScopeHeader):
            name = part.geometry.scope
            missing.discard(name)
        if name not in names or isinstance(part, Counters):
            yield part
        elif isinstance(part, Pages):
            dropped[f"scope {name}"] += len(part)
    # An error, not a warning: a name that is mistyped would keep the scope that has to go.
    if missing:
        raise SnapshotError(
            f"there is no scope {min(missing)}; --without names those that `hicache metadata "
            f"scopes` lists"
        )


def emptied(pages: Pages) -> EmptySlots:
    """Return the slots of removed pages, as free ones."""
    return EmptySlots(pages.slots, pages.generations, [0.0] * len(pages))
