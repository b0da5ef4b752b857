"""All calls from many threads at once."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.history.counterexample import judge
from hicache_conformance.history.events import Call, Recorder
from hicache_conformance.history.workload import Client, Workload
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import check
from hicache_storage.spec import PoolName, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_storage.spec import StorageIdentity

THREADS: Final = 8
LONGEST: Final = 6
FRESH_PAGES: Final = 48
"""Pages that are read while they are set: a page can be seen half written only once."""
MIX: Final[Mapping[Call, int]] = {Call.SET: 3, Call.GET: 3, Call.EXISTS: 1}


class ConcurrencyCases:
    """CC-1."""

    @covers("CC-1")
    def test_many_threads(self, context: CaseContext) -> None:
        """Eight threads set, read and look up the same few keys, and ask for counters.

        Their history can be.
        """
        sut, keys = context.storage(pools=_wide_pool()), context.keys(12)
        history = _SharedHistory(context, sut.identity)
        # Counters are asked for at the same time, because an engine exports them from a thread of
        # its own; a driver that copies its tables without a lock raises here.
        together("CC-1", [*history.threads(sut, keys, MIX), _counting(context, sut)])
        # Nobody deleted anything, so what the threads have left can be read, and is somebody's.
        last = history.client("afterwards", context.clients(sut, THREADS)[0])
        last.call(Call.SET, keys, PoolName.KV, history.values(1))
        last.call(Call.GET, keys, PoolName.KV)
        history.judge()

    @covers("CC-1", needs=["clears"])
    def test_many_threads_and_clear(self, context: CaseContext) -> None:
        """The same while one thread clears the namespace again and again."""
        sut, keys = context.storage(pools=_wide_pool()), context.keys(12)
        history = _SharedHistory(context, sut.identity)
        clearing = history.client("clears", sut)

        def clear() -> None:
            # Fewer clears than other calls: with as many the store would be empty most of the time,
            # and gets would meet nothing that could be wrong.
            for _ in range(context.profile.thread_calls // 4):
                clearing.call(Call.CLEAR, [], PoolName.KV)

        together("CC-1", [*history.threads(sut, keys, MIX), clear])
        history.judge()
        # A clear that raced with sets may leave an index that points nowhere; fresh pages show
        # whether the store still serves.
        fresh = context.keys(4)
        sut.store(fresh)
        sut.expect(fresh)

    @covers("CC-1", needs=["deletes"])
    def test_many_threads_and_deletes(self, context: CaseContext) -> None:
        """The same while every thread deletes pages, too."""
        sut, keys = context.storage(pools=_wide_pool()), context.keys(12)
        history = _SharedHistory(context, sut.identity)
        together("CC-1", history.threads(sut, keys, {**MIX, Call.DELETE: 1}))
        history.judge()

    @covers("CC-1", "GET-1", "ID-6")
    def test_pages_are_read_while_they_are_set(self, context: CaseContext) -> None:
        """Two threads ask for each page while a third one sets it: it is whole, or not there.

        What exists finds, a get delivers.
        """
        sut = context.storage(pools={PoolName.KV: GuardedPool(pages=12)})
        keys, ended = context.keys(FRESH_PAGES), threading.Event()
        writer, *readers = context.clients(sut, 3)
        being_set = keys[:1]

        def write() -> None:
            try:
                for key in keys:
                    being_set[0] = key
                    writer.store([key])
            finally:
                ended.set()

        def read(client: StorageUnderTest) -> None:
            while not ended.is_set():
                _check_whole(context, client, being_set[0])

        together("CC-1", [write, *(partial(read, client) for client in readers)])
        sut.expect(keys[-12:])

    @covers("CC-1")
    def test_many_threads_and_pools(self, context: CaseContext) -> None:
        """Threads set and read two pools in one call, in one order and in the other."""
        pools = [PoolName.KV, PoolName.MAMBA]
        sut = context.storage(pools={pool: GuardedPool(pages=8 * THREADS) for pool in pools})

        def use(client: StorageUnderTest, order: list[PoolName], keys: list[str]) -> None:
            groups = [PageGroup(keys, pool) for pool in order]
            for _ in range(context.profile.thread_calls // 3):
                client.store_many(groups)
                found = client.get_many(groups)
                for pool in order:
                    client.compare(keys, found[pool], pool)

        together(
            "CC-1",
            [
                partial(use, client, pools if number % 2 else pools[::-1], context.keys(3))
                for number, client in enumerate(context.clients(sut, THREADS))
            ],
        )

    @covers("CC-1")
    def test_pools_are_registered_during_calls(self, context: CaseContext) -> None:
        """Calls of one pool succeed while another one is registered again and again."""
        sut, keys = context.storage(pools=_wide_pool()), context.keys(4)
        sut.store(keys)
        registered = threading.Event()

        def read(client: StorageUnderTest) -> None:
            while not registered.is_set():
                client.expect(keys)
                client.expect_existing(keys, rule="CC-1")

        def register() -> None:
            try:
                for _ in range(10):
                    context.with_pool(sut, PoolName.DRAFT, GuardedPool(pages=4))
            finally:
                registered.set()

        clients = context.clients(sut, THREADS)[:3]
        together("CC-1", [*(partial(read, client) for client in clients), register])

    @covers("CC-1")
    def test_many_storages(self, context: CaseContext) -> None:
        """Eight storages of one identity, each opened, used and closed in a thread of its own."""
        identity, keys = context.identity(), context.keys(6)
        suts = [context.unopened(identity) for _ in range(THREADS)]
        # Storages that share nothing have a history each.
        shares = context.capabilities.sharing is not Sharing.NONE
        histories = (
            [_SharedHistory(context, identity)] * THREADS
            if shares
            else [_SharedHistory(context, identity) for _ in suts]
        )

        def use(number: int, sut: StorageUnderTest, client: Client) -> None:
            sut.call("open", sut.storage.open)
            # Each thread sets and reads at once, so that the opening of one storage overlaps with
            # the work and the closing of others.
            for _ in range(5):
                client.call(Call.SET, keys, PoolName.KV, histories[number].values(1))
                client.call(Call.GET, keys, PoolName.KV)
            sut.call("close", sut.storage.close)

        clients = [histories[number].client(str(number), sut) for number, sut in enumerate(suts)]
        together(
            "CC-1",
            [
                partial(use, number, *pair)
                for number, pair in enumerate(zip(suts, clients, strict=True))
            ],
        )
        for history in dict.fromkeys(histories):
            history.judge()


class _SharedHistory:
    """Threads on storages of one identity, and the history that they make together."""

    def __init__(self, context: CaseContext, identity: StorageIdentity) -> None:
        self._context = context
        self._identity = identity
        self._recorders = list[Recorder]()
        self._numbers = itertools.count()
        self._values = itertools.count(1)

    def values(self, count: int) -> int:
        """The first of so many values that nobody else writes."""
        return next(itertools.islice(self._values, count - 1, count)) - count + 1

    def client(self, name: str, sut: StorageUnderTest) -> Client:
        """A thread's share of a storage; what it does is part of the history."""
        recorder = Recorder()
        self._recorders.append(recorder)
        return Client(name, sut, self._context.patterns, recorder.note, self._numbers)

    def threads(
        self, sut: StorageUnderTest, keys: list[str], mix: Mapping[Call, int]
    ) -> list[Callable[[], object]]:
        """Return the work of each thread of one storage."""
        calls = self._context.profile.thread_calls
        work = Workload(
            seed=str(self._context.number("crowd")),
            calls=calls,
            clients=THREADS,
            keys=tuple(keys),
            max_keys=LONGEST,
            mix=dict(mix),
            # A value for each set of each thread. Two sets of one value could not be told apart,
            # and a lost update would pass.
            first_value=self.values(THREADS * calls),
        )
        return [
            partial(self.client(str(number), share).run, work, number)
            for number, share in enumerate(self._context.clients(sut, THREADS))
        ]

    def judge(self) -> None:
        """Check the history.

        Raises:
            Violation: something that was answered cannot be.
        """
        events = [event for recorder in self._recorders for event in recorder.events()]
        keeps = not self._context.capabilities.evicts
        judge(events, self._identity, self._context.patterns, "CC-1", keeps=keeps)


def _check_whole(context: CaseContext, client: StorageUnderTest, key: str) -> None:
    """Ask for a page that is being set.

    Raises:
        Violation: GET-1 for wrong bytes, ID-6 for a page that exists and cannot be read.
    """
    faults = client.storage.fault_count()
    there = client.has(key)
    [content] = client.get([key])
    client.check_right([key], [content], when=", read while it was set,")
    # Other interfaces do not promise it of a page whose set has not answered.
    if context.interface_profile.is_native and not context.capabilities.evicts:
        check(
            content is not None or not there or client.storage.fault_count() != faults,
            "ID-6",
            f"page key {short(key)} is said to exist while it is set, and a get after that answers "
            f"False",
        )


def _wide_pool() -> dict[str, GuardedPool]:
    # Each thread gets host pages of its own, so that a page which changes under a thread was
    # written by the driver and not by a neighbour.
    return {PoolName.KV: GuardedPool(pages=16 * THREADS)}


def _counting(context: CaseContext, sut: StorageUnderTest) -> Callable[[], object]:
    def count() -> None:
        for _ in range(context.profile.thread_calls):
            sut.stats()

    return count
