"""Events about pages: whatever the order of sets, removals and reports, listeners end with what is there."""

from __future__ import annotations

import copy
import random
import threading
from collections import defaultdict

import pytest

from hicache_storage.engines import page_events
from hicache_storage.engines.bridge_storage import RefusedCalls
from hicache_storage.engines.page_events import PageEvents, PageId
from hicache_storage.spec import (
    Capabilities,
    MissReason,
    PoolStats,
    Removal,
    RemovalReason,
    Removals,
    RemovalScope,
    StorageStats,
)
from tests.support.waiting import eventually


class Store:
    """A storage with the calls that events need, whose removals are reported as the tests say."""

    def __init__(self, scope: RemovalScope = RemovalScope.STORE) -> None:
        self.capabilities = Capabilities(removals=scope)
        self.present = set[str]()
        self.log = list[Removal]()
        self.lost = False
        self.stats = StorageStats("store", pools={"kv": PoolStats()})
        self.failing = ""
        self.lookups = list[list[str]]()
        self.answered = lambda: None
        """Called when a lookup has its answer, before it returns."""

    def put(self, *keys: str) -> list[bool]:
        self.present.update(keys)
        return [True] * len(keys)

    def remove(self, *keys: str) -> None:
        self.present.difference_update(keys)
        self.log += [Removal("kv", key, RemovalReason.EVICTED, 0.0, "") for key in keys]

    def removals(self, since: int | None = None) -> Removals:
        assert self.capabilities.removals is not RemovalScope.NONE
        end, lost = len(self.log), self.lost
        self.lost = False
        return Removals([] if since is None else self.log[since:end], end, lost)

    def batch_present(self, keys, *, pool: str) -> list[bool]:
        assert pool == "kv"
        assert len(keys) <= page_events.MAX_LOOKUP
        self.lookups.append(keys)
        match self.failing:
            case "fault":
                self.stats.faults += 1
            case "breaker":
                self.stats.breaker_refusals += 1
            case "refused":
                self.stats.pools["kv"].absent[MissReason.REFUSED] += len(keys)
            case "raises":
                raise OSError(5, "gone")
        if self.failing:
            return [False] * len(keys)
        found = [key in self.present for key in keys]
        self.answered()
        return found

    def get_stats(self) -> StorageStats:
        return copy.deepcopy(self.stats)


class Listener:
    """What a listener knows, and what it was told."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known = set[str]()
        self.told = list[tuple[str, bool]]()
        self.refusals = RefusedCalls("test")
        self.events = PageEvents[str](self.publish, self.refusals)
        self.events.watch(store)

    def publish(self, keys, *, removed: bool) -> None:
        (self.known.difference_update if removed else self.known.update)(keys)
        self.told += [(key, removed) for key in keys]

    def pages(self, *keys: str) -> list[PageId]:
        return [PageId(self.store, "kv", key) for key in keys]

    def call(self, *keys: str, move=None) -> list[bool]:
        answers = [False] * len(keys)
        with self.events.call(self.pages(*keys), keys, answers):
            answers[:] = move() if move else self.store.put(*keys)
        return answers


@pytest.fixture(autouse=True)
def no_polls(monkeypatch):
    """The tests poll themselves."""
    monkeypatch.setattr(page_events, "POLL_SECONDS", 3600)


@pytest.fixture
def listener():
    made = Listener(Store())
    made.events.poll()
    yield made
    made.events.close()


def test_pages_that_were_not_stored_are_not_published(listener):
    """And their removals are not looked up."""

    def raise_error() -> list[bool]:
        raise OSError(5, "gone")

    assert listener.call("a", "b", move=lambda: [False, True]) == [False, True]
    with pytest.raises(OSError, match="gone"):
        listener.call("c", move=raise_error)
    assert listener.known == {"b"}
    listener.store.remove("a", "c", "unknown")
    listener.events.poll()
    assert listener.store.lookups == []


def test_what_was_removed_before_the_watch_began_does_not_stay():
    listener = Listener(Store())
    listener.call("a", "b")
    listener.store.remove("a")
    listener.events.poll()
    assert listener.known == {"b"}
    listener.events.close()


def test_a_page_that_is_missed_is_looked_up(listener):
    """Also of a storage that reports no removals."""
    listener.call("a", "b", "c")
    listener.store.present.clear()
    listener.call("a", move=lambda: [False])
    listener.events.doubt(listener.pages("b", "unknown"))
    listener.events.poll()
    assert listener.known == {"c"}
    assert listener.store.lookups == [["a", "b"]]


def test_pages_of_a_storage_that_reports_nothing_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(page_events, "MAX_UNWATCHED", 3)
    for scope, kept in ((RemovalScope.NONE, ["b", "c", "d"]), (RemovalScope.STORE, [*"abcd"])):
        listener = Listener(Store(scope))
        listener.call(*"abcd")
        assert [key for _, key in listener.events.published()] == kept
        assert listener.known == set("abcd")
        listener.events.close()


def test_pages_are_listed_in_the_order_of_their_events(listener):
    listener.call("b", "a", "c")
    numbers = [number for number, _ in listener.events.published()]
    listener.store.remove("b")
    listener.events.poll()
    listener.call("b")
    assert [key for _, key in listener.events.published(after=numbers[1])] == ["c", "b"]
    listener.events.forget()
    assert (listener.events.published(), listener.known) == ([], set())


def test_it_is_behind_until_a_poll_that_began_after_the_last_call_is_over(listener):
    assert not listener.events.behind
    listener.call("a")
    assert listener.events.behind
    listener.store.remove("a")
    listener.store.answered = lambda: listener.call("b")
    listener.events.poll()
    assert listener.events.behind
    listener.store.answered = lambda: None
    listener.events.poll()
    assert not listener.events.behind


def test_the_thread_polls_whatever_a_storage_raises(monkeypatch):
    monkeypatch.setattr(page_events, "POLL_SECONDS", 0.001)
    broken, store = Store(), Store()
    monkeypatch.setattr(broken, "removals", None)
    listener = Listener(broken)
    listener.events.watch(store)
    listener.store = store
    listener.call("a")
    eventually(lambda: not listener.events.behind)
    store.remove("a")
    eventually(lambda: not listener.known)
    assert listener.refusals.count > 0
    listener.events.close()
    assert "hicache-removals" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("seed", range(20))
def test_listeners_end_with_what_is_there(monkeypatch, seed):
    """Calls, removals and polls in any order, each in the middle of any other; some removals are
    lost, and some lookups fail."""
    monkeypatch.setattr(page_events, "MAX_LOOKUP", 2)
    draw = random.Random(seed)
    listener = Listener(Store())
    store, depth = listener.store, defaultdict(int)

    def step() -> None:
        key = draw.choice("abc")
        kind = draw.choice(["set", "get", "remove", "poll", "poll", "fail"])
        # Two polls of one thread never overlap.
        if kind == "poll" and not depth["poll"]:
            depth["poll"] += 1
            listener.events.poll()
            depth["poll"] -= 1
        elif kind == "remove" and key in store.present:
            store.remove(key)
            if not draw.randrange(4):
                store.log.pop()
                store.lost = True
        elif kind == "fail":
            store.failing = draw.choice(["", "", "fault", "breaker", "refused", "raises"])
        elif kind in ("set", "get") and depth["call"] < 3:
            depth["call"] += 1
            listener.call(key, move=lambda: among(kind, key))
            depth["call"] -= 1

    def among(kind: str, key: str) -> list[bool]:
        some_steps()
        answers = store.put(key) if kind == "set" else [key in store.present]
        some_steps()
        return answers

    def some_steps() -> None:
        for _ in range(draw.choice([0, 0, 1, 2])):
            step()

    for _ in range(200):
        store.answered = some_steps
        for _ in range(draw.randrange(8)):
            step()
        store.answered = lambda: None
        store.failing = ""
        listener.events.poll()
        # Nobody else stores: what is there was published when it was set.
        assert listener.known == store.present
    for key in "abc":
        # Each once: listeners may count them.
        events = [removed for each, removed in listener.told if each == key]
        assert events == [bool(number % 2) for number in range(len(events))]
    listener.events.close()
