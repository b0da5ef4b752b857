"""Faults in the pages that are delivered and stored, and in the names under which they are kept."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
from drivers_memory import Objects, Plain, PlainPath, fill
from mutant import always, instead, mutant

from hicache_storage.objects import ObjectWrite
from hicache_storage.objects.requests import PoolRequest
from hicache_storage.pools.access import PageAccess
from hicache_storage.spec import HostPool, PoolName, StorageUnavailableError

plain, objects = partial(mutant, base=Plain), partial(mutant, base=Objects)
MAX_BATCH = 64
"""Pages of a request, for those that make one request of a batch."""
WINDOW_SECONDS = 0.002


# What a get delivers
# ------------------------------------------------------------------------------------------------


def always_true(right, store, *page):
    right(*page)
    return True


def disk_gone(right, store, request):
    raise OSError("the disk is gone")


def first_component(right, store, pool, key, page):
    kept = [bytes(buffer) for buffer in page[1:]]
    done = right(pool, key, page)
    for buffer, before in zip(page[1:], kept, strict=True):
        buffer[:] = before
    return done


def what_there_is(right, store, pool, key, page):
    """A page is delivered as far as it was stored, and stored without its last component."""
    stored = store.pages.get(store.place(pool, key))
    if stored is not None:
        fill(page, stored.ljust(sum(map(len, page)), b"\0"))
    return stored is not None


def without_the_last(right, store, pool, key, page):
    return right(pool, key, page[:-1] or page)


def descending_sorted(right, store, request):
    """Host pages that descend are written in one piece, from the lowest on."""
    if len(request.keys) >= 4 and request.slots == sorted(request.slots, reverse=True):
        request.slots.sort()
    return right(request)


def first_pages(right, store, request):
    """A batch's first pages are moved, and True is said of the others."""
    first = PoolRequest(request.pool, request.keys[:MAX_BATCH], request.slots[:MAX_BATCH])
    return [*right(first), *[True] * len(request.keys[MAX_BATCH:])]


def indices_by_memory(right, store, transfers, *more):
    """A tensor of indices is translated once, and known again by its memory."""

    def known(transfer):
        given = transfer.host_indices
        if not hasattr(given, "clone"):
            return transfer
        # The tensor is kept, so that no other one gets its memory.
        _, slots = store.memo.setdefault(id(given), (given, given.clone()))
        return replace(transfer, host_indices=slots)

    return right([known(transfer) for transfer in transfers], *more)


plain("SET-1 Misses", "page 0 key", there=always(False), take=always(False))
plain("GET-1 EX-2 AlwaysTrue", "was not written", there=always(True), take=always_true)
plain("GET-1 SET-7 Raises", "batch_get_v2 raised OSError: the disk is gone", read=disk_gone)
plain("GET-1 GET-4 LosesV Reading", "was not written at byte 96", take=first_component)
plain("GET-4 StoresK Reading", "holds zeros", put=without_the_last, take=what_there_is)
plain("GET-1 ReadsSixtyFourPages Reading", "was not written", read=first_pages)
plain("GET-1 SortsDescendingPages Reading", "holds bytes of key", write=descending_sorted)
plain("GET-1 CachesIndices Key", "page", get=indices_by_memory)


# What a call touches
# ------------------------------------------------------------------------------------------------


def of_the_plain_tensor(right, store, transfers, *more):
    """The memory of the indices is taken for the indices, whatever part of it they are."""
    import torch

    store.check_open()
    for transfer in transfers:
        given = transfer.host_indices
        if isinstance(given, torch.Tensor) and given.dtype == torch.int64:
            whole = torch.empty(0, dtype=torch.int64).set_(given.untyped_storage())
            transfer.host_indices = whole[: given.numel()]
    return right(transfers, *more)


def emptied_keys(right, store, transfers, *more):
    answer = right(transfers, *more)
    for transfer in transfers:
        if isinstance(transfer.keys, list):
            transfer.keys.clear()
    return answer


def scrambled_sources(right, store, request):
    done = right(request)
    for page in request.pool.access.sources(request.slots):
        for buffer in page:
            if not buffer.readonly:
                buffer[:] = bytes(byte ^ 0xFF for byte in buffer)
    return done


def postponed(right, store, transfers, *more):
    """A set is carried out with the next call, from the caller's own lists."""
    store.memo["lent"] = lambda: right(transfers, *more)
    return {transfer.name: [True] * len(transfer.keys or ()) for transfer in transfers}


def carried_out(right, store, *arguments):
    store.memo.pop("lent", int)()
    return right(*arguments)


def view_kept(right, store, pool, key, page):
    """A page is copied when it is first read, not when it is set."""
    place = store.place(pool, key)
    if place not in store.pages:
        store.shared.setdefault(place, page)
        store.pages[place] = b""
    return True


def copied_late(right, store, pool, key, page):
    place = store.place(pool, key)
    if (late := store.shared.pop(place, None)) is not None:
        store.pages[place] = b"".join(late)
    return right(pool, key, page)


class FlatPages(PageAccess):
    """What an engine's pool gives as a flat page, which is a copy."""

    def __init__(self, pool, geometry):
        self.pool = pool
        self.geometry = geometry

    def sources(self, first_slots):
        # Here, because a plugin must not import torch.
        from hicache_storage.pools import byte_view

        return [[byte_view(self.pool.get_data_page(slot))] for slot in first_slots]

    targets = sources


def flattened(right, store, host_pool, name):
    right(host_pool, name)
    pool = store.pools[PoolName(name)]
    if not isinstance(host_pool, HostPool):
        store.pools[pool.name] = replace(pool, access=FlatPages(host_pool, pool.access.geometry))


def aligned_down(right, store, request):
    """Memory is used from the last multiple of eight bytes on, as a device would."""
    targets = request.pool.access.targets(request.slots)
    address = numpy.frombuffer(targets[0][0], dtype=numpy.uint8).ctypes.data if targets else 0
    done = right(request)
    for page in targets if address % 8 else []:
        shift = address % 8
        page[0][:-shift] = bytes(page[0])[shift:]
    return done


plain("GET-2 ReadsThePlainTensor Reading", "touched page", get=of_the_plain_tensor)
plain("GET-2 ScramblesItsSources Writing", "changed host page", write=scrambled_sources)
plain("ID-6 EmptiesItsKeys Key", "keys", set=emptied_keys)
plain(
    "ID-6 KeepsTheCallersKeys Key",
    "answers False",
    set=postponed,
    read=carried_out,
    there=carried_out,
)
plain("SET-7 KeepsHostPages Writing", "SET-7: page 0 key", put=view_kept, take=copied_late)
plain("GET-8 FlattensPages HostPool", "was not written", register=flattened)
plain("GET-8 AlignsDown HostPool", "GET-8: page", deliver=aligned_down)
plain(
    "FT-1 RaisesWhatThePoolRaises test_a_pool_that_fails",
    "the host pool raised, and so did the call",
    read=instead(Plain.deliver),
)


# What a set stores
# ------------------------------------------------------------------------------------------------


def rewritten(right, store, pool, key, page):
    """A page is written anew where it need not be."""
    store.pages.pop(store.place(pool, key), None)
    return right(pool, key, page)


def all_or_nothing(right, store, request):
    there = [store.there(request.pool, key) for key in request.keys]
    return [False] * len(there) if any(there) and not all(there) else right(request)


def stored_as(change):
    """A page is stored in another form, from which it does not come back."""

    def put(right, store, pool, key, page):
        store.pages.setdefault(store.place(pool, key), change(b"".join(page)))
        return True

    return put


plain("SET-1 Refuses", "was refused", put=always(False))
plain("SET-1 WritesSixtyFourPages Reading Writing", "get answers False", write=first_pages)
plain(
    "SET-1 StripsZeros Writing",
    "a page of zeros was stored",
    put=stored_as(lambda page: page.rstrip(b"\x00") or b"\x00"),
)
plain(
    "SET-1 EndsAtItsMark Writing",
    "a page of the envelope's mark",
    put=stored_as(lambda page: page.partition(b"HCP2")[0]),
)
plain("SET-3 Rewrites Writing", "a set wrote it anew", put=rewritten)
plain(
    "SET-6 AllOrNothing Writing",
    "of a batch of existing, repeated and new pages was refused",
    write=all_or_nothing,
)


# Names
# ------------------------------------------------------------------------------------------------


def case_of(store):
    """The salt's middle, which tells one case from another; each would find the one before."""
    return tuple(store.identity.salt.split(".")[:2])


def named(change):
    """A page is kept under the name of another key."""
    return lambda right, store, pool, key: right(pool, change(key))


def any_geometry(right, store, pool, key, page):
    stored = store.pages.get(store.place(pool, key))
    for buffer in page:
        buffer[:] = ((stored or b"") + bytes(4096))[: len(buffer)]
    return stored is not None


def by_pool(place):
    """Pages are named by the identity and the pool, without the namespace of the pool."""
    return {
        "place": lambda right, store, pool, key: place(store, pool, key),
        "doomed": instead(
            lambda store: [
                name
                for name in [*store.pages]
                for pool in store.pools.values()
                if name[:-1] == place(store, pool, "")[:-1]
            ]
        ),
    }


def without_ranks(store, pool):
    """The namespace of a pool, without the ranks that hold other bytes."""
    alone = replace(store.identity, pp_rank=0, cp_rank=0, dp_rank=0)
    return alone.fingerprint(pool.name)


def by_prefix(step):
    """A page is named by the last prefix key of the call, too."""

    def call(right, store, first, *more, **named):
        extra_info = more[-1] if len(more) > step else named.get("extra_info")
        store.memo["prefix"] = tuple((extra_info and extra_info.prefix_keys) or ())[-1:]
        try:
            return right(first, *more, **named)
        finally:
            store.memo["prefix"] = ()

    return call


def by_the_key(right, store, pool, key, page):
    """A file for each page, named as the key is."""
    path = Path(store.config.path) / "pages" / f"{key}.bin"
    if "escape" in key and not key.startswith("/"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(page))
    return right(pool, key, page)


def elsewhere(right, store, pool, key, page):
    """What is set goes by another name than what is read."""
    store.pages.setdefault((pool.namespace.name, key.strip("/")), b"".join(page))
    return True


plain(
    "ID-1 ID-3 ID-4 LC-4 IgnoresIdentity Identity Clearing",
    "holds bytes written under",
    every_case=True,
    **by_pool(lambda store, pool, key: (*case_of(store), str(pool.name), key)),
)
plain(
    "ID-1 IgnoresGeometry Identity",
    "was set from a pool of another geometry",
    take=any_geometry,
    **by_pool(lambda store, pool, key: (store.identity.fingerprint(pool.name), key)),
)
plain("ID-3 EveryRankWrites Identity", "rank 1 is not the writer", writes=always(True))
plain(
    "ID-4 IgnoresRanks test_ranks_of_one_group",
    "ID-4: page",
    **by_pool(lambda store, pool, key: (without_ranks(store, pool), key)),
)
plain(
    "GET-1 IgnoresPools Pool",
    "holds bytes of pool",
    place=lambda right, store, pool, key: (store.identity.fingerprint(PoolName.KV), key),
)
plain("ID-5 IgnoresCase Key", "holds bytes of key", place=named(str.lower))
plain("ID-5 PastesKeys Key", "holds bytes of key", place=named(lambda key: key.replace("/", "-")))
plain("ID-5 CutsKeys Key", "holds bytes of key", place=named(lambda key: key[:255]))
plain("ID-5 WritesByPath Key", "wrote outside the store", base=PlainPath, put=by_the_key)
plain("ID-5 StripsKeys Key", "holds bytes of key", place=named(str.strip))
plain("ID-6 SetLooksElsewhere Key", "was set, and exists looks elsewhere", put=elsewhere)
plain(
    "ID-6 NamesByPrefix Key",
    "prefix",
    exists=by_prefix(1),
    get=by_prefix(0),
    set=by_prefix(0),
    place=lambda right, store, pool, key: (*right(pool, key), store.memo.get("prefix", ())),
)


# Threads
# ------------------------------------------------------------------------------------------------

SCRATCH = bytearray(8 << 20)


def scratch_buffer(right, store, pool, key, page):
    """All threads read through one buffer."""
    stored = store.pages.get(store.place(pool, key))
    if stored is None or len(stored) != sum(map(len, page)):
        return False
    SCRATCH[: len(stored)] = stored
    threading.Event().wait(0.0005)
    return fill(page, SCRATCH[: len(stored)])


def from_scratch(right, store, host_pool, name):
    """The list of pools is made anew when one is registered."""
    before = dict(store.pools)
    store.pools.clear()
    time.sleep(WINDOW_SECONDS)
    right(host_pool, name)
    store.pools.update({name: pool for name, pool in before.items() if name not in store.pools})


def in_the_callers_order(right, store, transfers, *more):
    """The pools of a call are locked one after the other."""
    with contextlib.ExitStack() as held:
        for name in dict.fromkeys(transfer.name for transfer in transfers):
            lock = store.memo.setdefault(name, threading.Lock())
            # A deadlock ends, so that a test of it takes no minutes.
            if not lock.acquire(timeout=0.5):
                raise StorageUnavailableError(f"waited too long for the lock of {name!r}")
            held.callback(lock.release)
            time.sleep(0.001)
        return right(transfers, *more)


def blanked(right, store, keys, *, pool=PoolName.KV):
    """A page is blanked in place before it is removed."""
    for key in keys:
        place = store.place(store.pools[PoolName(pool)], key)
        if (stored := store.pages.get(place)) is not None:
            store.pages[place] = bytes(len(stored))
    time.sleep(0.001)
    return right(keys, pool=pool)


def listed_first(right, store, pool, key, page):
    """A page is listed before it can be read."""
    place = store.place(pool, key)
    if place not in store.pages:
        store.seen.add(place)
        time.sleep(WINDOW_SECONDS)
        right(pool, key, page)
        store.seen.discard(place)
    return True


threads = partial(plain, where="Concurrency")
threads(
    "ID-6 FindsBeforeItStores",
    "said to exist",
    put=listed_first,
    there=lambda right, store, pool, key: store.place(pool, key) in store.seen or right(pool, key),
)
threads("CC-1 SharesAScratchBuffer", "holds bytes of key", take=scratch_buffer)
plain(
    "CC-1 RegistersFromScratch test_pools_are_registered_during_calls",
    "registered",
    register=from_scratch,
)
plain(
    "CC-1 LocksInTheCallersOrder test_many_threads_and_pools",
    "raised StorageUnavailableError",
    set=in_the_callers_order,
)
plain("CC-1 BlanksWhatItDeletes test_many_threads_and_deletes", "zeros", delete=blanked)


# Damage
# ------------------------------------------------------------------------------------------------


def verifying(some):
    """Envelopes of the other pages are made up, so that nothing notices damage."""

    def read_objects(right, store, batches, call):
        filled = right(batches, call)
        for batch, done in zip(batches, filled, strict=True):
            for index, read in enumerate(batch.reads):
                if done[index] and not some(batch, index):
                    read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
        return filled

    return read_objects


def hidden_damage(right, store, batches, call):
    filled = right(batches, call)
    for batch, done in zip(batches, filled, strict=True):
        for index, read in enumerate(batch.reads):
            done[index] = done[index] and read.verify()
            read.damaged = False
    return filled


def put_under(right, store, batches, call):
    """Whatever is there stays."""
    before = dict(store.objects)
    answers = right(batches, call)
    store.objects.update(before)
    return answers


damage = partial(objects, where="CorruptObject")
damage(
    "GET-5 VerifiesTheFirstPage",
    "is damaged",
    read_objects=verifying(lambda batch, index: index == 0),
)
damage(
    "GET-5 VerifiesKVOnly",
    "is damaged",
    read_objects=verifying(lambda batch, index: batch.namespace.pool == PoolName.KV),
)
damage("GET-7 EX-9 HidesDamage", "counted 0 damaged pages", read_objects=hidden_damage)
damage(
    "SET-3 KeepsDamage",
    "and a get answers False",
    write_objects=put_under,
    discard_objects=always(False),
)
