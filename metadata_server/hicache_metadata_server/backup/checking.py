"""Pages of a snapshot, compared with the data files of the driver, some at a time and several at
once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.slots.checking import DEFECTS, ExpectedPage, SlotFileSet, Verdict
from hicache_metadata_server.backup.parts import Pages, ScopeHead, joined

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hicache_backends.hf3fs.slots.checking import CheckedFile
    from hicache_metadata_server.backup.parts import Part

THREADS: Final = 8
NOT_OF_HERE: Final = "in scopes of other directories"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A page that is not in its slot."""

    scope: str
    slot: int
    key: str
    generation: int
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.scope}: slot {self.slot} {self.verdict}: {self.key!r}"


@dataclass(slots=True)
class Checked:
    """What a check has found."""

    verdicts: Counter[str] = field(default_factory=Counter[str])
    """Pages by `Verdict`, or `NOT_OF_HERE`."""
    misfits: list[Misfit] = field(default_factory=list[Misfit])

    @property
    def unreadable(self) -> int:
        """Pages of which nothing is known, because the file system did not give them."""
        return self.verdicts[Verdict.UNREADABLE]


class PageChecker:
    """Compares pages with files, at most `THREADS` of them at once; closes what it opens.

    Raises:
        OSError: the path is no directory of the driver.
    """

    def __init__(self, path: Path) -> None:
        self._directory = SlotFileSet(str(path))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fsck")
        self._files: dict[str, CheckedFile | None] = {}

    def enter(self, head: ScopeHead) -> None:
        """A scope whose pages are going to be asked for. Of others the files are let go: there may
        be thousands."""
        for file in self._files.values():
            if file is not None:
                file.close()
        self._files[head.geometry.scope] = self._directory.file_of(head.geometry)

    def knows(self, scope: str) -> bool:
        """Whether a scope is of this directory."""
        return self._files[scope] is not None

    def verdicts(self, scope: str, pages: Pages) -> list[Verdict]:
        """One for each page of a scope that is known."""
        file = self._files[scope]
        assert file is not None, "asked `knows` before"
        claims = map(ExpectedPage, pages.slots, pages.keys, pages.lengths, pages.checksums)
        return list(self._threads.map(file.verdict, claims))

    def misfits(self, scope: str, pages: Pages) -> list[str]:
        """What is wrong with each page of a scope that is known, or ""; what cannot be read is
        taken to be right."""
        return [
            str(verdict) if verdict in DEFECTS else "" for verdict in self.verdicts(scope, pages)
        ]

    def close(self) -> None:
        """End the threads and close the files."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            if file is not None:
                file.close()


def check(parts: Iterable[Part], checker: PageChecker) -> Checked:
    """Look at all pages of a snapshot."""
    found, name = Checked(), ""
    for part in parts:
        if isinstance(part, ScopeHead):
            checker.enter(part)
            name = part.geometry.scope
        elif isinstance(part, Pages) and not checker.knows(name):
            found.verdicts[NOT_OF_HERE] += len(part)
        elif isinstance(part, Pages):
            verdicts = checker.verdicts(name, part)
            found.verdicts.update(verdicts)
            rows = zip(part.slots, part.keys, part.generations, verdicts, strict=True)
            found.misfits += [Misfit(name, *row) for row in rows if row[3] in DEFECTS]
    return found


def sampled(parts: Iterable[Part], size: int, chance: random.Random) -> Iterator[Part]:
    """Each scope's head, and so many of its pages, each as likely as any other."""
    head, seen, chosen = None, 0, list[Pages]()
    for part in parts:
        if isinstance(part, Pages):
            for place in range(len(part)):
                seen += 1
                if len(chosen) < size:
                    chosen.append(part.at([place]))
                elif (instead := chance.randrange(seen)) < size:
                    chosen[instead] = part.at([place])
        elif isinstance(part, ScopeHead):
            if head is not None:
                yield from (head, joined(chosen))
            head, seen, chosen = part, 0, []
    if head is not None:
        yield from (head, joined(chosen))
