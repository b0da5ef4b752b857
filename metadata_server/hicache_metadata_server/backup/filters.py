"""What a snapshot leaves out on its way into a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_metadata_server.backup.page_checks import defects_of
from hicache_metadata_server.backup.parts import (
    Counters,
    EmptySlots,
    Pages,
    ScopeHeader,
    SnapshotError,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Container, Iterable, Iterator

    from hicache_metadata_server.backup.page_checks import PageChecker
    from hicache_metadata_server.backup.parts import SnapshotPart

LEAP: Final = 1 << 40
"""Numbers that are left out behind those of a backup: more than any server has given since."""


def verifiable(parts: Iterable[SnapshotPart], dropped: Counter[str]) -> Iterator[SnapshotPart]:
    """Without the pages that no reader can verify: their slots may hold other pages by now, and
    nobody would notice."""
    for part in parts:
        if not isinstance(part, Pages):
            yield part
            continue
        kept, gone = part.partition([checksum != 0 for checksum in part.checksums].__getitem__)
        dropped["written without a checksum"] += len(gone)
        yield emptied(gone)
        yield kept


def restored(parts: Iterable[SnapshotPart], until: float) -> Iterator[SnapshotPart]:
    """As a backup is to be taken over: no number is given again that was given since, and all slots
    that hold nothing rest until then, because a writer may have a lease on them that the backup
    does not know of."""
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
    """Without the pages that are not in their slots; those of other directories stay."""
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
    parts: Iterable[SnapshotPart], going: Container[tuple[str, int]]
) -> Iterator[SnapshotPart]:
    """Without the pages in some slots of some scopes."""
    name = ""
    for part in parts:
        if isinstance(part, ScopeHeader):
            name = part.geometry.scope
        if not isinstance(part, Pages):
            yield part
            continue
        kept, gone = part.partition([(name, slot) not in going for slot in part.slots].__getitem__)
        yield kept
        yield emptied(gone)


def without_scopes(
    parts: Iterable[SnapshotPart], names: Collection[str], dropped: Counter[str]
) -> Iterator[SnapshotPart]:
    """Without some scopes: whoever names one of them later makes it anew. Lease numbers go on in
    stores that count them for all scopes together; a shared store counts those of each, from the
    beginning.

    Raises:
        SnapshotError: at the end, one of them was not there.
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
    if missing:
        raise SnapshotError(
            f"there is no scope {min(missing)}; --without names those that `hicache metadata "
            f"scopes` lists"
        )


def emptied(pages: Pages) -> EmptySlots:
    """The slots of pages that go; they are free."""
    return EmptySlots(pages.slots, pages.generations, [0.0] * len(pages))
