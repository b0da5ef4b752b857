"""Faults in what a storage remembers, and in how it begins, ends and lives in a process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from drivers_memory import Objects, Plain, PlainPath, fill
from mutant import IN_PROCESS, NOTHING, always, instead, mutant, right

from hicache_storage.spec import PoolName

plain, objects = partial(mutant, base=Plain), partial(mutant, base=Objects)

BASIC = (
    "Existence Reading Writing CorruptObject HostPool Pool Key Identity Clearing "
    "History Concurrency Misuse"
)
right(f"Plain {BASIC}", Plain)
right("Objects Budget Stats", Objects)
right("LeavesChecksumsOut CorruptObject", Objects, verifies=False)


# Promises
# ------------------------------------------------------------------------------------------------


def on_its_own(right, store, identity, config):
    right(identity, config)
    store.objects = {}


right("PromisesNothing Identity Clearing Sharing Durability Shard", Objects,
    promises=NOTHING, init=on_its_own,
)  # fmt: skip
right("PromisesTooLittle Identity Sharing", Objects, promises=NOTHING)
objects("ID-2 PromisesTooMuch Identity", "page 0 key", init=on_its_own)
plain("LC-6 DeclaresMoreWhenOpen Lifecycle", "declares sharing=process", registered=NOTHING)


# Caches of pages, of lookups and of misses
# ------------------------------------------------------------------------------------------------


def read_cache():
    """Pages that were read are delivered again, until this storage removes them itself."""

    def take(right, store, pool, key, page):
        place = store.place(pool, key)
        if fill(page, store.memo.get(place)):
            return True
        done = right(pool, key, page)
        if done:
            store.memo[place] = b"".join(page)
        return done

    def drop(right, store, pool, key):
        store.memo.pop(store.place(pool, key), None)
        return right(pool, key)

    def wipe(right, store):
        right()
        store.memo.clear()

    return {"take": take, "drop": drop, "wipe": wipe}


def lookup_cache(name):
    """Pages that a lookup has found are there, until this storage clears them itself."""

    def there(right, store, pool, key):
        if right(pool, key):
            store.seen.add(name(store, pool, key))
        return name(store, pool, key) in store.seen

    def wipe(right, store):
        right()
        store.seen.clear()

    return {"there": there, "wipe": wipe}


def missing_for_good(right, store, pool, key):
    """A page that was missing is missing until this storage sets it itself."""
    place = store.place(pool, key)
    if not right(pool, key):
        store.seen.add(place)
    return place not in store.seen


def set_here(right, store, pool, key, page):
    store.seen.discard(store.place(pool, key))
    return right(pool, key, page)


plain(
    "SET-1 LC-4 ReadCacheMissesOthersRemovals Writing Clearing",
    "by another storage",
    **read_cache(),
)
plain(
    "SET-1 DeleteKeepsTheLookupCache Writing",
    "exists says",
    **lookup_cache(lambda store, pool, key: store.place(pool, key)),
)
plain(
    "ID-2 RemembersMisses Identity",
    "get answers False",
    there=missing_for_good,
    put=set_here,
    take=lambda right, store, pool, key, page: store.there(pool, key) and right(pool, key, page),
)
plain(
    "EX-3 LookupCacheIgnoresPools Existence",
    "extra_pool_hit_pages",
    **lookup_cache(lambda store, pool, key: key),
)


# What is removed
# ------------------------------------------------------------------------------------------------


def with_equal(right, store, pool, key):
    """Equal pages are taken for one, and go together."""
    gone, removed = store.pages.get(store.place(pool, key)), right(pool, key)
    for place in [place for place, page in store.pages.items() if page == gone]:
        del store.pages[place]
    return removed


def with_all_equal(right, store):
    gone = {store.pages[place] for place in store.doomed()}
    right()
    for place in [place for place, page in store.pages.items() if page in gone]:
        del store.pages[place]


def kept_aside(doomed):
    """What is removed is kept aside, and comes back when the storage is closed."""

    def step(right, store, *page):
        places = doomed(store, *page)
        store.memo |= {place: store.pages[place] for place in places if place in store.pages}
        return right(*page)

    return step


def put_back(right, store):
    for place, page in store.memo.items():
        store.pages.setdefault(place, page)
    right()


def wiped_once(right, store):
    if not store.seen and store.doomed():
        right()
        store.seen.add("cleared")


def wiped_twice(right, store):
    right()
    store.memo["clears"] = store.memo.get("clears", 0) + 1
    store.memo["again"] = right


def before_the_end(right, store, *page):
    """The fourth clear goes on when it has returned, and takes what is set next."""
    answer = right(*page)
    if store.memo.get("clears") == 4:
        store.memo.pop("again", lambda: None)()
    return answer


def from_all_pools(right, store, keys, *, pool=PoolName.KV):
    for other in store.pools:
        if other != pool:
            right(keys, pool=other)
    return right(keys, pool=pool)


def all_for_none(right, store, keys, *, pool=PoolName.KV):
    if not keys:
        store.clear()
    return right(keys, pool=pool)


def with_strangers(right, store):
    right()
    for path in Path(store.config.path).iterdir():
        path.unlink()


def made(right, store):
    right()
    Path(store.config.path).mkdir(parents=True, exist_ok=True)


plain("SET-1 DeletesEqualPages Writing", "get answers False", drop=with_equal)
plain(
    "SET-1 ReopeningUndoesDeletes Writing",
    "was deleted",
    close=put_back,
    drop=kept_aside(lambda store, pool, key: [store.place(pool, key)]),
)
plain("SET-1 DeletesInAllPools Pool", "of pool 'kv' was stored", delete=from_all_pools)
plain("SET-1 NoKeysDeleteEverything Writing", "get answers False", delete=all_for_none)
clears = partial(plain, breaks="LC-4", where="Clearing")
clears("ClearsEqualPages", "of equal bytes", wipe=with_all_equal)
clears("ReopeningUndoesClears", "was cleared", close=put_back, wipe=kept_aside(Plain.doomed))
clears("ClearsOnce", "was cleared", wipe=wiped_once)
clears("ClearsTwice", "after a clear had returned", wipe=wiped_twice, put=before_the_end)
clears(
    "NoPoolsClearEverything",
    "which has no pools",
    doomed=lambda right, store: right() if store.pools else [*store.pages],
)
clears(
    "ClearsStrangersFiles",
    "a file of somebody else",
    base=PlainPath,
    open=made,
    wipe=with_strangers,
)


# How it begins and ends
# ------------------------------------------------------------------------------------------------

LEFT: list[Any] = []
"""What is kept for good."""


def late_once(right, store):
    right()
    if not store.seen:
        store.seen.add("late")
        time.sleep(1.0)


MAY_HANG = replace(IN_PROCESS, may_hang=True)
right("OpensLate test_a_clear_that_hangs test_closing_a_hung_store", Objects,
    promises=MAY_HANG, connect=late_once,
)  # fmt: skip


def opening(then):
    """`open()` does something more."""

    def step(right, store, *arguments):
        answer = right(*arguments)
        then(store)
        return answer

    return step


def connecting(store):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("127.0.0.1", 9))


def writing(store):
    Path(store.config.path).mkdir(parents=True, exist_ok=True)
    (Path(store.config.path) / f"owner-{os.getpid()}").touch()


def starting_a_thread(store):
    threading.Thread(target=threading.Event().wait, daemon=True, name="left-behind").start()


def starting_a_process(store):
    quiet = subprocess.DEVNULL
    LEFT.append(subprocess.Popen(["sleep", "30"], stdin=quiet, stdout=quiet, stderr=quiet))


def handling(store):
    signal.signal(signal.SIGUSR2, lambda *_: None)


def exiting(store):
    if threading.current_thread() is not threading.main_thread():
        sys.exit("no server")


def connected(right, store, *arguments):
    """Only this call connects."""
    store.seen.add("connected")
    return right(*arguments)


def if_connected(otherwise):
    return lambda right, store, *arguments: (
        right(*arguments) if "connected" in store.seen else otherwise
    )


def not_in_children(right, store):
    right()
    if os.getpid() != store.memo.setdefault("process", os.getpid()):
        raise RuntimeError("bad file descriptor")


def born_here(right, store, identity, config):
    right(identity, config)
    store.memo["process"] = os.getpid()


life = partial(plain, where="Lifecycle")
left = partial(plain, breaks="LC-2", where="test_nothing_is_left_behind")
alone = partial(plain, breaks="LC-3", where="test_the_process_is_left_alone")
life("LC-1 ConnectsAtOnce", "connects (socket.connect)", init=opening(connecting))
life("LC-1 WritesAtOnce", "wrote into its directory", base=PlainPath, init=opening(writing))
plain(
    "LC-1 ConnectsToSet test_any_call_may_be_the_first",
    "first call",
    open=connected,
    set=connected,
    take=if_connected(False),
    there=if_connected(False),
)
plain(
    "LC-1 ClearsBeforeItConnects test_any_call_may_be_the_first",
    "clear",
    open=connected,
    set=connected,
    doomed=if_connected([]),
)
left("LeavesAThread", "thread 'left-behind'", open=opening(starting_a_thread))
left(
    "LeavesADescriptor",
    "/dev/null",
    open=opening(lambda store: LEFT.append(os.open("/dev/null", os.O_RDONLY))),
)
left("LeavesAProcess", "child process", open=opening(starting_a_process))
life(
    "LC-2 KeepsPools",
    "still holds its host pool",
    register=lambda right, store, pool, name: (right(pool, name), LEFT.append(pool)),
)
life("LC-2 WorksWhenClosed", "after close() raised nothing", check_open=always(None))
plain(
    "LC-2 ClearsWhenClosed test_calls_after_close", "clear after close", clear=instead(Plain.wipe)
)
alone(
    "ConfiguresLogging",
    "the root logger's level",
    open=opening(lambda store: logging.getLogger().setLevel(logging.DEBUG)),
)
life(
    "LC-3 NeedsTheMainThread",
    "main thread",
    open=opening(handling),
)
life("LC-3 Exits", "tried to end the process", open=opening(exiting))
life(
    "LC-5 ForgetsForks",
    "got RuntimeError: bad file descriptor",
    init=born_here,
    check_open=not_in_children,
)


# What it says to misuse, and what it logs
# ------------------------------------------------------------------------------------------------


def swallowed(right, store, transfers, *more):
    try:
        return right(transfers, *more)
    except ValueError:
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def of_registered_pools(right, store, transfers, *more):
    for transfer in transfers:
        store.pools[transfer.name]
    return right(transfers, *more)


def one_by_one(right, store, transfers, *more):
    answer: dict[str, list[bool]] = {}
    for transfer in transfers:
        for name, done in right([transfer], *more).items():
            answer.setdefault(name, []).extend(done)
    return answer


def logged_misses(right, store, pool, key, page):
    done = right(pool, key, page)
    if not done:
        logging.getLogger("sample").warning("page %s is not there", key)
    return done


def misses_as_faults(right, store, batches, call):
    answers = right(batches, call)
    if not all(map(all, answers)):
        store.recorder.count_fault()
    return answers


misuse = partial(plain, breaks="FT-2", where="Misuse")
misuse("SwallowsMisuse", "raised nothing", get=swallowed)
misuse("ForeignErrors", "raised KeyError, which is no HiCacheError", set=of_registered_pools)
misuse("WritesBeforeItChecks", "before it raised", set=one_by_one)
plain("GET-6 LogsMisses Reading", "logged WARNING", take=logged_misses)
objects("GET-6 CountsMissesAsFaults Reading", "counted as faults", read_objects=misses_as_faults)
