"""Life cycle of a storage: import, open, close, and the resources that it takes and gives back."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.fault_calls import UNGUARDED
from hicache_conformance.harness.concurrency import eventually, together
from hicache_conformance.harness.global_state import unchanged_globals
from hicache_conformance.harness.import_probe import probe
from hicache_conformance.harness.leak_check import OpenResources
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation, check, checked
from hicache_conformance.processes.forked_child import ask_in_child
from hicache_storage.plugins import registry
from hicache_storage.spec import HiCacheStorage, PoolName, PoolTransfer, StorageClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest


CALLERS: Final = 4
CHILDREN: Final = 12
CHILD_SECONDS: Final = 5.0
"""How long a child that was forked during calls may take; it has some milliseconds of work."""
SWITCH_SECONDS: Final = 1e-5


class LifecycleCases:
    """LC-1 to LC-3, LC-5 and LC-6."""

    @covers("LC-1")
    def test_import_and_construct(self, context: CaseContext) -> None:
        """In a fresh process: no engine, no GPU, no connection, no signal handler.

        Nothing is written, and no logging is set up.
        """
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
        """Without open(), the first call finds its own way.

        open() after that, and twice, does no harm.
        """
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
    @pytest.mark.parametrize("call", ["batch_exists_v2", "batch_get_v2"])
    def test_any_call_may_be_the_first(self, context: CaseContext, call: str) -> None:
        """A storage that nobody has opened serves another one's pages in its first call."""
        _, two, keys = _unopened_twin(context)
        found = (
            two.exists(keys).kv_hit_pages
            if call == "batch_exists_v2"
            else len(keys) - two.get(keys).count(None)
        )
        check(
            found == len(keys),
            "LC-1",
            f"{call} finds {found} of {len(keys)} pages in the first call of a storage that was not "
            f"opened",
        )

    @covers("LC-1", needs=["sharing>=process", "deletes"])
    def test_a_delete_may_be_the_first_call(self, context: CaseContext) -> None:
        """A storage that nobody has opened deletes another one's pages in its first call."""
        one, two, keys = _unopened_twin(context)
        check(two.delete(keys) == [True] * 3, "LC-1", "a delete in a first call answered False")
        one.expect_missing(keys, rule="LC-1", why="was deleted in another storage's first call")

    @covers("LC-1", needs=["sharing>=process", "clears"])
    def test_a_clear_may_be_the_first_call(self, context: CaseContext) -> None:
        """A storage that nobody has opened clears another one's pages in its first call."""
        one, two, keys = _unopened_twin(context)
        two.call("clear", two.storage.clear)
        one.expect_missing(keys, rule="LC-1", why="was cleared in another storage's first call")

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
        sut, keys = context.storage(options=UNGUARDED), context.keys(2)
        sut.store(keys)
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
            _check_closed(name, ask)
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
            _check_closed("batch_exists_v2", lambda: sut.storage.batch_exists_v2(["a"]))  # noqa: B023 - called at once

    @covers("LC-2")
    def test_nothing_is_left_behind(self, context: CaseContext) -> None:
        """Storages that are opened, used and closed leave no thread, descriptor or process."""
        # The first one may import modules and start what the process keeps.
        _live_once(context)
        before = OpenResources.now()
        for _ in range(5):
            _live_once(context)
        left = _after_grace(context, lambda: OpenResources.now().beyond(before))
        check(not left, "LC-2", f"5 storages were opened, used and closed; they left {left}")

    @covers("LC-2")
    def test_the_host_pool_is_let_go(self, context: CaseContext) -> None:
        """A closed storage that is dropped keeps none of its host pool's memory registered."""
        kept = _after_grace(context, partial(_still_alive, _live_and_forget(context)))
        check(
            not kept,
            "LC-2",
            "the storage is closed and gone, and something still holds its host pool",
        )

    @covers("LC-2")
    def test_close_during_calls(self, context: CaseContext) -> None:
        """close() ends while eight threads call.

        Each thread gets answers and then StorageClosedError.
        """
        sut, keys = context.storage(pools={PoolName.KV: GuardedPool(pages=128)}), context.keys(8)
        sut.store(keys)
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
    def test_a_forked_child(self, context: CaseContext) -> None:
        """A child that was forked from an opened storage gets an error that says why, or its pages.

        Its parent goes on.
        """
        sut, keys = context.storage(), context.keys(4)
        sut.store(keys)
        sut.expect(keys)
        told = ask_in_child(sut, keys)
        check(not told, "LC-5", told)
        sut.expect(keys, rule="LC-5")
        more = context.keys(2)
        sut.store(more)
        sut.expect(more)

    @covers("LC-5")
    def test_children_forked_during_calls(self, context: CaseContext) -> None:
        """Children that are forked while threads call get a clear error or a storage that works.

        They never hang.
        """
        sut, keys = (
            context.storage(pools={PoolName.KV: GuardedPool(pages=16 * CALLERS)}),
            context.keys(4),
        )
        sut.store(keys)
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
                    told = ask_in_child(clients[-1], keys, within=CHILD_SECONDS, everything=True)
                    check(not told, "LC-5", told)
            finally:
                ended.set()

        with _threads_in_turns():
            together(
                "LC-5", [*(partial(call, client, context.keys(3)) for client in clients[:-1]), fork]
            )
        sut.expect(keys, rule="LC-5")


def _unopened_twin(
    context: CaseContext,
) -> tuple[StorageUnderTest, StorageUnderTest, list[str]]:
    """A storage, another of its identity that is not opened, and pages that the first has stored."""
    one, keys = context.storage(), context.keys(3)
    one.store(keys)
    return one, context.unopened(replace(one.identity)), keys


@contextlib.contextmanager
def _threads_in_turns() -> Generator[None]:
    """Let threads take turns so often that a fork meets another one at any place."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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


def _live_and_forget(context: CaseContext) -> weakref.ref[GuardedPool]:
    memory = GuardedPool(pages=8)
    _live_once(context, memory)
    return weakref.ref(memory)


def _still_alive(reference: weakref.ref[GuardedPool]) -> str:
    gc.collect()
    return "" if reference() is None else "alive"


def _after_grace(context: CaseContext, look: Callable[[], str]) -> str:
    """Return what `look` still finds after a grace period."""
    eventually(lambda: not look(), context.profile.grace_seconds, 0.05)
    return look()


def _check_closed(name: str, ask: Callable[[], object]) -> None:
    checked("LC-2")
    try:
        answer = ask()
    except StorageClosedError:
        return
    except Exception as error:
        raise Violation(
            "LC-2",
            f"{name} after close() raised {type(error).__name__} and not StorageClosedError: "
            f"{error}",
        ) from error
    raise Violation("LC-2", f"{name} after close() raised nothing and answered {answer!r:.100}")


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
