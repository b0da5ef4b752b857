"""Stores that are a directory: it is deleted, or files of others are put into it."""

from __future__ import annotations

import re
import shutil
import time
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.fault_calls import check_hits
from hicache_conformance.fixtures.small_store import BATCH, capacity_of, open_long_pages
from hicache_conformance.fixtures.target import DIRECTORY
from hicache_conformance.harness.concurrency import eventually
from hicache_conformance.model.case import check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.plugins import registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_storage.spec import StorageIdentity

DELETIONS: Final = 3
STORE_PAGES: Final = 24
MAX_NAMES: Final = 12
"""Files of the store whose names strangers imitate."""
_NUMBER: Final = re.compile(r"[0-9a-f]+")


class DirectoryCases:
    """FT-4 and SET-1 where others have their hands in the store's directory."""

    @covers("FT-4", "SET-1", levels=Level.FAULTS, needs=[DIRECTORY])
    def test_a_store_that_is_deleted_and_made_again(self, context: CaseContext) -> None:
        """The directory is emptied under an open storage, which sets again."""
        config, home = context.apart()
        sut, keys = open_long_pages(context, config), context.keys(3)
        sut.store(keys)
        for number in range(DELETIONS):
            _empty(home)
            _make_again(context, sut, keys, home, number + 1)
        for reader in (sut, *_shared(context, config, sut.identity)):
            reader.expect(keys)

    @covers("SET-1", "GET-1", "FT-4", levels=Level.FAULTS, needs=[DIRECTORY, "sharing>=process"])
    def test_a_store_that_is_deleted_and_opened_anew(self, context: CaseContext) -> None:
        """The directory is emptied under an open storage, and another starts in it."""
        config, home = context.apart()
        early = open_long_pages(context, config)
        early.store(context.keys(3))
        _empty(home)
        both = early, open_long_pages(context, config, early.identity)
        until, missed = time.monotonic() + context.profile.recovery_seconds, True
        # Until they share a store again; a storage may look only now and then for what it has open.
        while missed and time.monotonic() < until:
            stored, missed = [list[str](), list[str]()], False
            for number in range(2 * BATCH):
                keys = context.keys(BATCH)
                answers = zip(keys, both[number % 2].set(keys), strict=True)
                stored[number % 2] += [key for key, ok in answers if ok]
            for sut, mine, others in zip(both, stored, reversed(stored), strict=True):
                sut.expect(mine)
                check_hits(sut, others, found := sut.get(others), "a directory that was emptied")
                missed |= None in found
            time.sleep(0.02)
        both[1].store(context.keys(BATCH))

    @covers("SET-1", "FT-1", levels=Level.FAULTS, needs=[DIRECTORY])
    def test_strangers_with_names_like_the_store_s_own(self, context: CaseContext) -> None:
        """Empty files whose names are the store's own with other numbers."""
        option = registry().get(context.driver).capacity_option
        config, home = context.apart()
        if option:
            config = {**config, option: f"{capacity_of(STORE_PAGES) // 1024}KiB"}
        early = open_long_pages(context, config)
        keys = context.keys(2 * BATCH)
        for start in range(0, len(keys), BATCH):
            early.store(keys[start : start + BATCH])
        for path in _look_alikes(home):
            # Empty, and with names of the store's own kind. A driver that trusts names takes them
            # for later changes, bundles of others, or pages.
            path.touch()
        # The one that opens later comes first, because it has nothing but the directory to go by.
        for reader in (*_shared(context, config, early.identity), early):
            reader.expect(keys)
            reader.expect_existing(keys, rule="SET-1")
            more = context.keys(BATCH)
            reader.store(more)
            keys += more
        early.expect(keys)


def _empty(home: Path) -> None:
    for entry in home.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _shared(
    context: CaseContext, config: Mapping[str, object], identity: StorageIdentity
) -> list[StorageUnderTest]:
    """A storage that opens later, where it sees what others have set."""
    return [open_long_pages(context, config, identity)] if context.shares else []


def _make_again(
    context: CaseContext, sut: StorageUnderTest, keys: list[str], home: Path, number: int
) -> None:
    """Set pages until they can be in the directory.

    Nobody else opens the store meanwhile, nor reads of it, because that could tell the storage that
    it is gone.
    """
    allowed, answers = context.profile.recovery_seconds, list[bool]()

    def is_stored() -> bool:
        answers[:] = sut.set(keys)
        return all(answers) and any(path.is_file() for path in home.rglob("*"))

    check(
        eventually(is_stored, allowed),
        "FT-4",
        f"{allowed:.0f} s after the store was deleted for the {number}. time, a set answers "
        f"{answers}, and there is no file in its directory",
    )


def _look_alikes(home: Path) -> Iterator[Path]:
    """Paths beside the store's files, each with one number of the name changed."""
    for path in [path for path in sorted(home.rglob("*")) if path.is_file()][:MAX_NAMES]:
        for number in _NUMBER.finditer(path.name):
            width = number.end() - number.start()
            # The largest number of the same width, of 64 bits, the smallest, and one that no 64-bit
            # counter holds.
            for other in ("f" * width, "f" * 16, "0" * width, "9" * 20):
                yield path.with_name(
                    path.name[: number.start()] + other + path.name[number.end() :]
                )
