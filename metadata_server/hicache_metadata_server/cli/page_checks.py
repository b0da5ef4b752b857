"""Comparison of pages with the data files of a driver.

Only the driver knows the layout of its files. The metadata server asks it through `PageChecker`,
and imports it by name when a command needs it: a server without any driver is complete.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol, cast

from hicache_metadata_server.core.errors import StoreError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from hicache_metadata_server.protocol import ScopeGeometry, SlotStatus

PROVIDER: Final = "hicache_backends.hf3fs.fsck"
"""Module of the driver whose `SlotFilePageChecker(path)` is a `PageChecker`."""
OTHER_DIRECTORY: Final = "in scopes of other directories"


ScopePages = tuple["ScopeGeometry", "list[SlotStatus]"]
"""Some pages of a scope; those of one scope follow each other."""


class PageVerdict(Protocol):
    """Result of one comparison; its text completes a sentence about the slot."""

    @property
    def is_defect(self) -> bool:
        """True if a reader would not take the slot for a hit."""
        ...

    @property
    def is_unreadable(self) -> bool:
        """True if the file system did not return the bytes, so that nothing is known of them."""
        ...


class PageChecker(Protocol):
    """Access of a driver to its own data files, read-only."""

    def open_scope(self, geometry: ScopeGeometry) -> bool:
        """Prepare for the pages of a scope; return False for a scope of another directory."""
        ...

    def check_pages(
        self,
        scope: str,
        slots: Sequence[int],
        keys: Sequence[str],
        lengths: Sequence[int],
        checksums: Sequence[int],
    ) -> Sequence[PageVerdict]:
        """Return one verdict for each page of a scope for which `open_scope` returned True."""
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


@dataclass(frozen=True, slots=True)
class PageDefect:
    """A live page whose slot does not hold its bytes."""

    scope: str
    page: SlotStatus
    verdict: PageVerdict

    def __str__(self) -> str:
        return f"{self.scope}: slot {self.page.slot} {self.verdict}: {self.page.key!r}"


@dataclass(slots=True)
class PageCheckReport:
    """Counts and defects of one check."""

    verdicts: Counter[str] = field(default_factory=Counter[str])
    """Pages by the text of their verdict, or `OTHER_DIRECTORY`."""
    defects: list[PageDefect] = field(default_factory=list[PageDefect])
    unreadable: int = 0
    """Pages that the file system did not return."""


def open_page_checker(path: Path) -> PageChecker:
    """Return the driver's checker for the data files in a directory.

    Raises:
        StoreError: the driver is not installed.
        OSError: the path is no directory of the driver.
    """
    try:
        provider = importlib.import_module(PROVIDER)
    except ImportError as error:
        raise StoreError(
            f"data files are read by the 3FS driver, which is not installed: "
            f"pip install hicache-storage ({error})"
        ) from error
    return cast("PageChecker", provider.SlotFilePageChecker(path))


def check_all_pages(pages: Iterable[ScopePages], checker: PageChecker) -> PageCheckReport:
    """Compare pages with the data files."""
    report = PageCheckReport()
    for geometry, parts in groupby(pages, itemgetter(0)):
        is_here = checker.open_scope(geometry)
        for _, part in parts:
            if not is_here:
                report.verdicts[OTHER_DIRECTORY] += len(part)
                continue
            verdicts = verdicts_of(checker, geometry.scope, part)
            report.verdicts.update(map(str, verdicts))
            report.unreadable += sum(verdict.is_unreadable for verdict in verdicts)
            report.defects += [
                PageDefect(geometry.scope, page, verdict)
                for page, verdict in zip(part, verdicts, strict=True)
                if verdict.is_defect
            ]
    return report


def verdicts_of(
    checker: PageChecker, scope: str, pages: Sequence[SlotStatus]
) -> Sequence[PageVerdict]:
    """Return one verdict for each page of an opened scope."""
    return checker.check_pages(
        scope,
        [page.slot for page in pages],
        [page.key for page in pages],
        [page.length for page in pages],
        [page.checksum for page in pages],
    )


def sampled(pages: Iterable[ScopePages], size: int, chance: random.Random) -> Iterator[ScopePages]:
    """Yield a uniform sample of each scope's pages."""
    for geometry, parts in groupby(pages, itemgetter(0)):
        # Reservoir sampling: nothing says in advance how many pages there are.
        chosen = list["SlotStatus"]()
        for number, page in enumerate(page for _, part in parts for page in part):
            if len(chosen) < size:
                chosen.append(page)
            elif (instead := chance.randrange(number + 1)) < size:
                chosen[instead] = page
        if chosen:
            yield geometry, chosen
