"""Faults of removals: what a listener is not told, is told twice, too early or wrongly."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from drivers_memory import Telling
from mutant import mutant, right

from hicache_storage.objects import Call
from hicache_storage.spec import RemovalReason

telling = partial(mutant, base=Telling, where="Removal")
right("Telling Removal Eviction", Telling)


def none_evicted(right, store, reason, place):
    if reason is not RemovalReason.EVICTED:
        right(reason, place)


def noted(right, store, reason, place):
    store.seen.add(place)
    right(reason, place)


def own_alone(right, store, namespaces, call):
    removed, lost = right(namespaces, call)
    return [one for one in removed if (one.namespace, one.key) in store.seen], lost


def each_once(right, store, namespaces, call):
    """A page that has gone is never told again, whatever happens to it."""
    removed, lost = right(namespaces, call)
    fresh = [one for one in removed if one.key not in store.seen]
    store.seen.update(one.key for one in removed)
    return fresh, lost


def again(right, store, namespaces, call):
    """The last removal is told with the next ones, too."""
    removed, lost = right(namespaces, call)
    told = [*store.memo.get("last", ()), *removed]
    store.memo["last"] = removed[-1:]
    return told, lost


def twice(right, store, reason, place):
    """A removal is noted by the step that removes, and by the feed of the store."""
    for _ in range(2):
        right(reason, place)


def announced(right, store, place, reason):
    """A removal is told, and happens a little later."""
    store.tell(reason, place)
    time.sleep(0.002)
    with store.medium.lock:
        return store.forget(place)


def next_one(right, store, namespace, pages):
    """The page that will be evicted next is told, before there is need."""
    slots = right(namespace, pages)
    if not store.medium.free:
        for place in list(store.medium.index)[:1]:
            store.tell(RemovalReason.EVICTED, place)
    return slots


def last_thousand(right, store, namespaces, call):
    removed, lost = right(namespaces, call)
    return removed[-1000:], lost


def asking_first(right, store, *arguments, **named):
    store.objects_exist([], Call())
    return right(*arguments, **named)


def as_evicted(right, store, reason, place):
    right(RemovalReason.EVICTED, place)


def long_ago(right, store, namespaces, call):
    removed, lost = right(namespaces, call)
    return [replace(one, seconds=time.monotonic()) for one in removed], lost


telling("RM-1 TellsOfNoEvictions", "is not reported", tell=none_evicted)
telling("RM-1 TellsOfItsOwnAlone", "is not reported", tell=noted, collect_removals=own_alone)
telling("RM-1 TellsEachKeyOnce", "is not reported", collect_removals=each_once)
telling("RM-2 TellsTwice", "the next call tells again", collect_removals=again)
telling("RM-2 TellsInTwoPlaces", "is reported 2 times", tell=twice)
telling("RM-3 TellsBeforeItHappens", "is reported, and exists", remove=announced)
telling("RM-3 TellsOfTheNextVictim", "is reported, and exists", reserve=next_one)
telling("RM-4 TellsOfTheLastAlone", "and lost is False", collect_removals=last_thousand)
telling(
    "RM-4 AlwaysLost",
    "the first call answered",
    removals=lambda right, store, *since, **named: replace(right(*since, **named), lost=True),
)
telling("RM-4 RaisesWhileAway", "removals raised", removals=asking_first)
telling("RM-5 CallsAllEvicted", "not evicted", tell=as_evicted)
telling("RM-5 DatesByAnotherClock", "before its case began", collect_removals=long_ago)
