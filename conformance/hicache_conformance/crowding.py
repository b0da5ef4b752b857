"""Stores that hold a known number of pages at most, and pages that push others out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.memory import GuardedPool
from hicache_conformance.needs import declares
from hicache_conformance.pages import short
from hicache_conformance.subject import Share
from hicache_conformance.violation import Untestable, Violation
from hicache_storage.spec import ConfigError, HiCacheStorageExtraInfo, PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.lab import Lab
    from hicache_conformance.memory import PoolMemory
    from hicache_conformance.subject import Subject
    from hicache_storage.spec import StorageIdentity

COMPONENTS: Final = (3072, 5120)
PAGE_BYTES: Final = sum(COMPONENTS)
OVERHEAD_BYTES: Final = 512
"""What a driver may keep beside a page (envelope, key, index) without holding fewer pages than a case counts on."""

BATCH: Final = 4
"""Pages that a call writes, where nothing else is said."""

POOL_PAGES: Final = 48


def pool(pages: int = POOL_PAGES) -> dict[str, PoolMemory]:
    """A host pool of long pages, beside which envelopes, keys and indexes do not count for much."""
    return {PoolName.KV: GuardedPool(pages=pages, components=COMPONENTS)}


def capacity_of(pages: int) -> int:
    """Bytes that so many pages take in a store that keeps a little beside each."""
    return pages * (PAGE_BYTES + OVERHEAD_BYTES)


def crowded(lab: Lab, pages: int) -> Subject:
    """A fresh store that holds about so many pages at most."""
    return joined(lab, lab.capped(capacity_of(pages)))


def joined(lab: Lab, config: Mapping[str, object], identity: StorageIdentity | None = None) -> Subject:
    """A storage on a store of limited capacity.

    Raises:
        Untestable: the driver does not take a capacity as small as this.
    """
    try:
        return lab.storage(identity, pools=pool(), config=config)
    except ConfigError as error:
        raise Untestable(f"the driver refuses a capacity of a few pages of {PAGE_BYTES} bytes: {error}") from error


def shares(lab: Lab) -> bool:
    """Whether two storages of this process see each other's pages."""
    return declares(lab.capabilities, "sharing>=process")


def press(lab: Lab, subject: Subject, pages: int, *, batch: int = BATCH) -> list[str]:
    """Write fresh pages, a batch at a time; those that were answered with True."""
    stored = list[str]()
    keys = lab.keys(pages, "other")
    for start in range(0, pages, batch):
        some = keys[start : start + batch]
        stored += [key for key, ok in zip(some, subject.set(some), strict=True) if ok]
    return stored


def set_behind(subject: Subject, prefix: Sequence[str], keys: Sequence[str]) -> list[bool]:
    """Store the pages that follow `prefix` in a chain, and say so."""
    share = Share(keys)
    placed = subject.own_pages(keys)
    subject.fill(share, placed)
    transfers, info = subject.transfers([share], [placed]), HiCacheStorageExtraInfo(prefix_keys=list(prefix))
    answer = subject.call("batch_set_v2", lambda: subject.storage.batch_set_v2(transfers, info))
    return list(answer[PoolName.KV])


def held(subject: Subject, keys: Sequence[str], *, rule: str) -> list[bool]:
    """Which pages can still be read.

    Raises:
        Violation: `rule`, for a page that is delivered with other bytes than its own.
    """
    there = list[bool]()
    step = len(subject.own_pages(list(keys))) or 1
    for start in range(0, len(keys), step):
        some = keys[start : start + step]
        for key, content in zip(some, subject.get(some), strict=True):
            wrong = subject.explain(key, content) if content is not None else ""
            if wrong:
                raise Violation(rule, f"page key {short(key)}, read while others push it out, {wrong}")
            there.append(content is not None)
    return there
