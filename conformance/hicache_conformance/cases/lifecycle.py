"""Life cycle of a storage: import, open, close, and the resources that it takes and gives back."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.fault_calls import UNGUARDED
from hicache_conformance.harness.concurrency import eventually, together
from hicache_conformance.harness.import_probe import probe
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.process_state import OpenResources, left_open, unchanged_globals
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest, check_raises
from hicache_conformance.model.case import Violation, check, checked, covers
from hicache_storage.plugins import registry
from hicache_storage.spec import (
    HiCacheError,
    HiCacheStorage,
    PoolName,
    PoolTransfer,
    StorageClosedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.fixtures.context import CaseContext

CHILD_SECONDS: Final = 20.0
"""A child that has not answered after this long hangs; it has some milliseconds of work."""
CALLERS: Final = 4
CHILDREN: Final = 12
SWITCH_SECONDS: Final = 1e-5


class LifecycleCases:
    """LC-1 to LC-3, LC-5 and LC-6."""

    @covers("LC-1")
    def test_import_and_construct(self, context: CaseContext) -> None:
        """Imported and constructed in a fresh process."""
        before = sorted(context.tmp.rglob("*"))
        found = probe(context.driver, context.config)
        check(not found, "LC-1", f"importing and constructing the driver {found}")
        check(
            sorted(context.tmp.rglob("*")) == before,
            "LC-1",
            "constructing the driver wrote into its directory; open() is for that",
        )

    @covers("LC-1")
    def test_the_first_call_connects(self, context: CaseContext) -> None:
        """Without open(), the first call finds its own way; open() after it is harmless."""
        sut, keys = context.unopened(), context.keys(3)
        sut.store(keys)
        for _ in range(2):
            sut.call("open", sut.storage.open)
        sut.expect(keys)
        check(
            sut.call("health", sut.storage.health).ok,
            "LC-1",
            f"the storage serves, and health() says {sut.storage.health()}",
        )

    @covers("LC-1", needs=["sharing>=process"])
    def test_any_call_may_be_the_first(self, context: CaseContext) -> None:
        """A storage that nobody has opened finds, or removes, another one's pages in a first call."""
        one, promised = context.storage(), context.capabilities
        asks: dict[str, Callable[[StorageUnderTest, list[str]], bool]] = {
            "batch_exists_v2": lambda two, keys: two.exists(keys).kv_hit_pages == len(keys),
            "batch_get_v2": lambda two, keys: None not in two.get(keys),
            **({"delete": lambda two, keys: all(two.delete(keys))} if promised.deletes else {}),
            **({"clear": lambda two, _: not two.clear()} if promised.clears else {}),
        }
        for name, ask in asks.items():
            keys = context.keys(3)
            one.store(keys)
            two = context.unopened(replace(one.identity))
            check(
                ask(two, keys),
                "LC-1",
                f"{name} does not do its work in the first call of a storage that was not opened",
            )
            if name in ("delete", "clear"):
                one.expect_missing(keys, rule="LC-1", why=f"was removed by another's first {name}")

    @covers("LC-6")
    def test_declared_when_open(self, context: CaseContext) -> None:
        """An open storage declares capabilities within those of its driver's registration."""
        promised, sut = registry().get(context.driver).capabilities, context.storage()
        added = sut.storage.capabilities.exceeding(promised)
        check(
            not added,
            "LC-6",
            f"the open storage declares {' and '.join(added)}; the driver is registered with less",
        )

    @covers("LC-2")
    def test_calls_after_close(self, context: CaseContext) -> None:
        """Calls raise StorageClosedError; close() again, get_stats() and health() do not raise."""
        # The circuit breakers refuse every call of a closed storage in the driver's place.
        sut, keys = context.stored(2, options=UNGUARDED)
        for _ in range(3):
            sut.call("close", sut.storage.close)
        transfer = PoolTransfer(PoolName.KV, slots_of([0, 1], 2), keys=keys)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("batch_exists_v2", lambda: sut.storage.batch_exists_v2(keys)),
            ("batch_present", lambda: sut.storage.batch_present(keys)),
            ("batch_get_v2", lambda: sut.storage.batch_get_v2([transfer])),
            ("batch_set_v2", lambda: sut.storage.batch_set_v2([transfer])),
            ("open", sut.storage.open),
        ]
        if context.capabilities.deletes:
            calls.append(("delete", lambda: sut.storage.delete(keys)))
        if context.capabilities.clears:
            calls.append(("clear", sut.storage.clear))
        for name, ask in calls:
            check_raises(StorageClosedError, "LC-2", f"{name} after close()", ask)
        sut.call("get_stats after close", sut.storage.get_stats)
        check(
            not sut.call("health after close", sut.storage.health).ok,
            "LC-2",
            "health() of a closed storage says that it can serve",
        )

    @covers("LC-2")
    def test_close_without_open(self, context: CaseContext) -> None:
        """A storage that never connected closes too, with pools and without."""
        for sut in (context.unopened(), context.unopened(pools={})):
            sut.call("close", sut.storage.close)
            ask = partial(sut.storage.batch_exists_v2, ["a"])
            check_raises(StorageClosedError, "LC-2", "batch_exists_v2 after close()", ask)

    @covers("LC-2")
    def test_nothing_is_left_behind(self, context: CaseContext) -> None:
        """Storages that are opened, used and closed leave no thread, descriptor or process."""
        # The first one may import modules and start what the process keeps.
        _live_once(context)
        before = OpenResources.now()
        for _ in range(5):
            _live_once(context)
        left = left_open(before, context.profile.grace_seconds)
        check(not left, "LC-2", f"5 storages were opened, used and closed; they left {left}")

    @covers("LC-2")
    def test_the_host_pool_is_let_go(self, context: CaseContext) -> None:
        """A closed storage that is dropped keeps none of its host pool's memory registered."""
        pool = GuardedPool(pages=8)
        _live_once(context, pool)
        kept = weakref.ref(pool)
        del pool

        def is_gone() -> bool:
            gc.collect()
            return kept() is None

        check(
            eventually(is_gone, context.profile.grace_seconds, 0.05),
            "LC-2",
            "the storage is closed and gone, and something still holds its host pool",
        )

    @covers("LC-2")
    def test_close_during_calls(self, context: CaseContext) -> None:
        """close() while eight threads call, which get answers until then."""
        sut, keys = context.stored(8, pools={PoolName.KV: GuardedPool(pages=128)})
        busy = threading.Semaphore(0)
        clients = context.clients(sut, 8)

        def close() -> None:
            for _ in clients:
                busy.acquire()
            sut.call("close", sut.storage.close)

        together(
            "LC-2",
            [*(partial(_call_until_closed, client, keys, busy) for client in clients), close],
        )

    @covers("LC-3")
    def test_another_thread_than_the_main_one(self, context: CaseContext) -> None:
        """Constructed, opened, used and closed in a thread of its own."""
        together("LC-3", [lambda: _live_once(context)])

    @covers("LC-3")
    def test_the_process_is_left_alone(self, context: CaseContext) -> None:
        """Signal handlers, the root logger and the exception hooks are what they were."""
        with unchanged_globals() as changed:
            _live_once(context)
        check(
            not changed,
            "LC-3",
            f"a storage was opened, used and closed, and changed {', '.join(changed)}",
        )

    @covers("LC-5")
    def test_children_forked_during_calls(self, context: CaseContext) -> None:
        """Children are forked while threads call: each gets a clear error or its parent's pages."""
        sut, keys = context.stored(4, pools={PoolName.KV: GuardedPool(pages=16 * CALLERS)})
        clients = context.clients(sut, CALLERS + 1)
        ended = threading.Event()

        def call(client: StorageUnderTest, own: list[str]) -> None:
            while not ended.is_set():
                client.exists(keys)
                client.set(own)
                client.get(own)
                client.stats()

        def fork() -> None:
            try:
                for _ in range(CHILDREN):
                    told = ask_in_child(clients[-1], keys)
                    check(not told, "LC-5", told)
            finally:
                ended.set()

        # Threads take turns so often that a fork meets another one at any place.
        context.opened.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
        together(
            "LC-5", [*(partial(call, client, context.keys(3)) for client in clients[:-1]), fork]
        )
        sut.expect(keys, rule="LC-5")
        more = context.keys(2)
        sut.store(more)
        sut.expect(more)


def _live_once(context: CaseContext, memory: GuardedPool | None = None) -> None:
    """Construct, open, use and close a storage."""
    storage = context.bare()
    try:
        storage.register_mem_host_pool_v2(memory or GuardedPool(pages=8), PoolName.KV)
        storage.open()
        keys = context.keys(2)
        storage.batch_set_v2([PoolTransfer(PoolName.KV, slots_of([1, 5], 2), keys=keys)])
        storage.batch_exists_v2(keys)
        storage.batch_get_v2([PoolTransfer(PoolName.KV, slots_of([2, 3], 2), keys=keys)])
        storage.get_stats()
    except SystemExit as error:
        raise Violation("LC-3", f"a driver tried to end the process: {error!r}") from error
    except Exception as error:
        raise Violation(
            "", f"opening and using a storage raised {type(error).__name__}: {error}"
        ) from error
    finally:
        storage.close()


def _call_until_closed(sut: StorageUnderTest, keys: list[str], busy: threading.Semaphore) -> None:
    storage: HiCacheStorage = sut.storage
    rounds = 0
    checked("LC-2")
    try:
        while True:
            storage.batch_exists_v2(keys)
            storage.batch_get_v2(sut.transfers([PageGroup(keys)], [sut.own_pages(keys)]))
            storage.batch_set_v2(sut.transfers([PageGroup(keys)], [sut.own_pages(keys)]))
            rounds += 1
            if rounds == 2:
                busy.release()
    except StorageClosedError:
        return
    except Exception as error:
        raise Violation(
            "LC-2",
            f"a call that ran while the storage was closed raised {type(error).__name__}: {error}",
        ) from error
    finally:
        busy.release()


def ask_in_child(sut: StorageUnderTest, keys: list[str]) -> str:
    """Read stored pages and make the other calls in a forked child; what was wrong, or nothing."""
    pages = sut.own_pages(keys)
    # Before the fork, because torch must not start threads in the child.
    transfers = sut.transfers([PageGroup(keys)], [pages])
    reading, writing = multiprocessing.Pipe(duplex=False)

    def ask() -> None:
        told = "the child was lost"
        try:
            told = _answer(sut, keys, pages, transfers) or _use(sut, keys, transfers)
        finally:
            writing.send(told)
            os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=ask)
    with warnings.catch_warnings():
        # Python warns of forking with threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    writing.close()
    with reading:
        try:
            if reading.poll(CHILD_SECONDS):
                return str(reading.recv())
            return f"a forked child that used its parent's storage hung for {CHILD_SECONDS:.0f} s"
        except EOFError:
            child.join()
            return (
                f"a forked child that used its parent's storage died with status {child.exitcode}"
            )
        finally:
            child.kill()
            child.join()


def _answer(
    sut: StorageUnderTest, keys: list[str], pages: list[int], transfers: list[PoolTransfer]
) -> str:
    try:
        answer = sut.storage.batch_get_v2(transfers)[PoolName.KV]
    except HiCacheError as error:
        silent = f"a forked child was refused with {type(error).__name__}, which says nothing"
        return "" if str(error) else silent
    except BaseException as error:  # noqa: BLE001 - told to the parent
        return f"a forked child that used its parent's storage got {type(error).__name__}: {error}"
    memory = sut.memories[PoolName.KV]
    for index, (key, page, ok) in enumerate(zip(keys, pages, answer, strict=True)):
        # A miss is wrong here: the parent has read these pages a moment before, and LC-5 allows a
        # clear error or a storage that works.
        if not ok:
            return f"page {index}: a forked child got neither an error nor the page that its parent had stored"
        wrong = sut.explain(key, memory.read(page))
        if wrong:
            return f"page {index}: a forked child was delivered a page that {wrong}"
    return ""


def _use(sut: StorageUnderTest, keys: list[str], transfers: list[PoolTransfer]) -> str:
    """Make the other calls of an engine, the last one of which closes."""
    storage = sut.storage
    for name, ask in (
        ("batch_exists_v2", partial(storage.batch_exists_v2, keys)),
        ("batch_set_v2", partial(storage.batch_set_v2, transfers)),
        ("get_stats", storage.get_stats),
        ("health", storage.health),
        ("close", storage.close),
    ):
        try:
            ask()
        except HiCacheError:
            continue
        except BaseException as error:  # noqa: BLE001 - told to the parent
            return f"{name} of a forked child that uses its parent's storage raised {type(error).__name__}: {error}"
    return ""
