"""All calls from many threads at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.catalogue import covers
from hicache_conformance.memory import GuardedPool
from hicache_conformance.pages import short
from hicache_conformance.threads import together
from hicache_conformance.violation import Violation
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from random import Random

    from hicache_conformance.lab import Lab
    from hicache_conformance.subject import Subject

THREADS: Final = 8
GENERATIONS: Final = range(THREADS)


class ConcurrencyCases:
    """CC-1."""

    @covers("CC-1")
    def test_many_threads(self, lab: Lab) -> None:
        """Eight threads set, read and look up the same few keys; each page that arrives is whole, and one that was written."""
        subject, keys = lab.storage(pools=_wide_pool()), lab.keys(12)
        together("CC-1", [partial(_work, *_lane(lab, subject, thread), keys, lab.profile.thread_calls) for thread in GENERATIONS])
        # Nobody deleted anything, so what the threads have left can be read, and is somebody's.
        subject.set(keys)
        _check_pages(subject, keys, subject.get(keys))

    @covers("CC-1", needs=["clears"])
    def test_many_threads_and_clear(self, lab: Lab) -> None:
        """The same while one thread clears the namespace again and again."""
        subject, keys = lab.storage(pools=_wide_pool()), lab.keys(12)
        workers = [partial(_work, *_lane(lab, subject, thread), keys, lab.profile.thread_calls) for thread in GENERATIONS]

        def clear() -> None:
            for _ in range(lab.profile.thread_calls // 4):
                subject.call("clear", subject.storage.clear)

        together("CC-1", [*workers, clear])
        fresh = lab.keys(4)
        subject.store(fresh)
        subject.expect(fresh)

    @covers("CC-1")
    def test_many_storages(self, lab: Lab) -> None:
        """Eight storages of one identity, each opened, used and closed in a thread of its own."""
        identity, keys = lab.identity(), lab.keys(6)
        subjects = [lab.unopened(identity) for _ in GENERATIONS]

        def use(subject: Subject, generation: int) -> None:
            subject.call("open", subject.storage.open)
            for _ in range(5):
                subject.set(keys, generation=generation)
                _check_pages(subject, keys, subject.get(keys))
            subject.call("close", subject.storage.close)

        together("CC-1", [partial(use, subject, generation) for generation, subject in enumerate(subjects)])


def _wide_pool() -> dict[str, GuardedPool]:
    return {PoolName.KV: GuardedPool(pages=16 * THREADS)}


def _lane(lab: Lab, subject: Subject, thread: int) -> tuple[Subject, Random, int]:
    return subject.lane(thread, THREADS, lab.chance(f"places {thread}")), lab.chance(f"thread {thread}"), thread


def _work(subject: Subject, random: Random, generation: int, keys: list[str], calls: int) -> None:
    for _ in range(calls):
        chain = random.sample(keys, random.randint(1, 6))
        match random.randrange(8):
            case 0 | 1 | 2:
                subject.set(chain, generation=generation)
            case 3 | 4 | 5:
                _check_pages(subject, chain, subject.get(chain))
            case 6:
                subject.exists(chain)
            case _:
                subject.stats()


def _check_pages(subject: Subject, keys: list[str], found: list[bytes | None]) -> None:
    for index, (key, content) in enumerate(zip(keys, found, strict=True)):
        if content is not None and subject.generation_of(key, content, PoolName.KV, GENERATIONS) is None:
            raise Violation("CC-1", f"page {index} key {short(key)} {subject.explain(key, content)}")
