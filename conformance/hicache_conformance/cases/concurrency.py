"""All calls from many threads at once."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.pools import GuardedPool, short
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest
from hicache_conformance.history.events import Call
from hicache_conformance.model.case import check, covers
from hicache_storage.spec import PoolName, Sharing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.history.events import Client

THREADS: Final = 8
FRESH_PAGES: Final = 48
"""Pages that are read while they are set: a page can be seen half written only once."""
MIX: Final[Mapping[Call, int]] = {Call.SET: 3, Call.GET: 3, Call.EXISTS: 1}


class ConcurrencyCases:
    """CC-1."""

    @covers("CC-1")
    def test_many_threads(self, context: CaseContext) -> None:
        """Eight threads set, read and look up the same few keys, and ask for counters."""
        group, sut, keys = _group(context)
        # Counters are asked for at the same time, because an engine exports them from a thread of
        # its own; a driver that copies its tables without a lock raises here.

        def count() -> None:
            for _ in range(context.profile.thread_calls):
                sut.stats()

        together("CC-1", [*group.threads(sut, THREADS, keys, MIX), count])
        # Nobody deleted anything, so what the threads have left can be read, and is somebody's.
        last = group.client("afterwards", context.clients(sut, THREADS)[0])
        last.call(Call.SET, keys, PoolName.KV, group.value())
        last.call(Call.GET, keys, PoolName.KV)
        group.judge("CC-1")

    @covers("CC-1", needs=["clears"])
    def test_many_threads_and_clear(self, context: CaseContext) -> None:
        """The same while one thread clears the namespace again and again."""
        group, sut, keys = _group(context)
        clearing = group.client("clears", sut)

        def clear() -> None:
            # Fewer clears than other calls: with as many the store would be empty most of the time,
            # and gets would meet nothing that could be wrong.
            for _ in range(context.profile.thread_calls // 4):
                clearing.call(Call.CLEAR, [], PoolName.KV)

        together("CC-1", [*group.threads(sut, THREADS, keys, MIX), clear])
        group.judge("CC-1")
        # A clear that raced with sets may leave an index that points nowhere; fresh pages show
        # whether the store still serves.
        fresh = context.keys(4)
        sut.store(fresh)
        sut.expect(fresh)

    @covers("CC-1", needs=["deletes"])
    def test_many_threads_and_deletes(self, context: CaseContext) -> None:
        """The same while every thread deletes pages, too."""
        group, sut, keys = _group(context)
        together("CC-1", group.threads(sut, THREADS, keys, {**MIX, Call.DELETE: 1}))
        group.judge("CC-1")

    @covers("CC-1", "GET-1", "ID-6")
    def test_pages_are_read_while_they_are_set(self, context: CaseContext) -> None:
        """Two threads ask for each page while a third one sets it."""
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
        sut, keys = context.stored(4, pools=_wide_pool())
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
        groups = [ProcessGroup(context)] * THREADS
        # Storages that share nothing have a history each.
        if context.capabilities.sharing is Sharing.NONE:
            groups = [ProcessGroup(context) for _ in range(THREADS)]
        keys = context.keys(6)

        def use(number: int, sut: StorageUnderTest, client: Client) -> None:
            sut.call("open", sut.storage.open)
            # Each thread sets and reads at once, so that the opening of one storage overlaps with
            # the work and the closing of others.
            for value in range(5 * number + 1, 5 * number + 6):
                client.call(Call.SET, keys, PoolName.KV, value)
                client.call(Call.GET, keys, PoolName.KV)
            sut.call("close", sut.storage.close)

        suts = [context.unopened(groups[0].identity) for _ in groups]
        clients = [group.client(str(number), suts[number]) for number, group in enumerate(groups)]
        uses = zip(range(THREADS), suts, clients, strict=True)
        together("CC-1", [partial(use, *each) for each in uses])
        for group in dict.fromkeys(groups):
            group.identity = groups[0].identity
            group.judge("CC-1")


def _group(context: CaseContext) -> tuple[ProcessGroup, StorageUnderTest, list[str]]:
    """Threads on one storage, which they share, and a few keys."""
    group = ProcessGroup(context)
    return group, context.storage(group.identity, pools=_wide_pool()), context.keys(12)


def _check_whole(context: CaseContext, client: StorageUnderTest, key: str) -> None:
    """Ask for a page that is being set."""
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
