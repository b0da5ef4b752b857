"""Faults that cost: requests, memory and time; and faults of pages in shards of KV heads."""

from __future__ import annotations

import copy
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from drivers_memory import Objects
from drivers_network import ACROSS, Networked, joined, name_of, split
from drivers_server import message, received
from mutant import mutant, right, works_as

from hicache_storage.objects import ObjectWrite
from hicache_storage.spec import PoolName

objects = partial(mutant, base=Objects)


# Calls of the driver
# ------------------------------------------------------------------------------------------------


def pool_by_pool(right, store, keys, pool_transfers=None, extra_info=None):
    for transfer in pool_transfers or ():
        right(keys, [transfer], extra_info)
    return right(keys, pool_transfers, extra_info)


def page_by_page(right, store, transfers, extra_info=None):
    answers = {transfer.name: [] for transfer in transfers}
    for transfer in transfers:
        keys, slots = transfer.keys or [], transfer.host_indices
        for index, key in enumerate(keys):
            size = len(slots) // len(keys)
            page = copy.copy(transfer)
            page.keys = [key]
            page.host_indices = slots[index * size : (index + 1) * size]
            answers[transfer.name] += right([page], extra_info)[transfer.name]
    return answers


objects(
    "EX-10 AsksForEachPool test_one_question_for_all_pools",
    "called objects_exist 3 times",
    exists=pool_by_pool,
)
objects("BU-1 ReadsPageByPage Budget", "read_objects 384 times", get=page_by_page)
objects("BU-1 WritesPageByPage Budget", "write_objects 384 times", set=page_by_page)


# Many keys, and memory
# ------------------------------------------------------------------------------------------------


def too_large(right, store, batches, call):
    if sum(len(batch.keys) for batch in batches) > 200_000:
        raise OSError("request entity too large")
    return right(batches, call)


def through_lists(right, store, batches, call):
    return [
        [found[list(batch.keys).index(key)] for key in batch.keys]
        for batch, found in zip(batches, right(batches, call), strict=True)
    ]


def mapped(content):
    mapping = mmap.mmap(-1, len(content) or 1)
    mapping[: len(content)] = content
    return mapping


def staged(right, store, batches, call):
    """All pages of a batch are copied aside before the first one goes into the host pool."""
    reads = [read for batch in batches for read in batch.reads]
    names = [read.namespace.object_name(read.key) for read in reads]
    copies = [mapped(store.objects.get(name, b"")) for name in names]
    answers = right(batches, call)
    copies.clear()
    return answers


objects(
    "EX-10 ChokesOnManyKeys Budget",
    "answered 0 and [], must be 40 and [20, 40]",
    objects_exist=too_large,
)
objects(
    "EX-10 LooksThroughLists Budget",
    "of 60 s for 250000 keys",
    objects_exist=through_lists,
)
staging = partial(objects, breaks="BU-2", where="Budget")
staging("StagesInMappings", "a get of 128 pages took memory for", read_objects=staged)


# Requests to a server
# ------------------------------------------------------------------------------------------------


class OneRequestAPage(Networked):
    """Stands before a store of one request for each page, with some of them in flight."""

    promises = replace(ACROSS, requests_in_flight=32)
    in_flight = 32

    def __init__(self, identity, config):
        super().__init__(identity, config)
        self.requests = ThreadPoolExecutor(self.in_flight)

    def disconnect(self):
        self.requests.shutdown()
        super().disconnect()

    def objects_exist(self, batches, call):
        names = [[name_of(batch.namespace, key) for key in batch.keys] for batch in batches]
        answers = self.requests.map(
            lambda name: self.asked(call, "exists", [name])[0], joined(names)
        )
        return split([*answers], names)


def in_packets(right, store, call, *request):
    """What is asked goes in 24 packets; one thread writes on while this one reads the answers."""
    if request[0] != "exists" or len(request[1]) < 2:
        return right(call, *request)
    names, size = request[1], -(-len(request[1]) // 24)
    packets = [names[at : at + size] for at in range(0, len(names), size)]
    with store.fresh(call) as connection:

        def write():
            for packet in packets:
                connection.sendall(message(("exists", packet)))
                # The server answers meanwhile: a new turn of the connection, and no wait.
                time.sleep(0.001)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            return joined(received(connection.recv) or () for _ in packets)
        finally:
            writer.join()


def name_by_name(right, store, call, *request):
    operation, names, *more = request
    if operation != "exists":
        return right(call, *request)
    return [right(call, operation, [name], *more)[0] for name in names]


ROUND_TRIPS = "test_one_round_trip[network] test_many_keys"
waits = partial(mutant, breaks="EX-10", where=ROUND_TRIPS)
right(f"OneRequestAPage {ROUND_TRIPS}", OneRequestAPage)
right(f"Pipelines {ROUND_TRIPS}", Networked, asked=in_packets)
waits(
    "AsksTwiceForEachPage",
    "made 768 requests, must be 384 at most",
    base=OneRequestAPage,
    in_flight=64,
    objects_exist=lambda right, store, batches, call: right([*batches] * 2, call)[: len(batches)],
)
waits(
    "WaitsForEachPage",
    "times for the server, must be 1 at most",
    base=Networked,
    asked=name_by_name,
)


# Shards
# ------------------------------------------------------------------------------------------------


def rearranged(change):
    """The shards of a pool are rearranged when it is registered."""

    def register(right, store, host_pool, name):
        right(host_pool, name)
        pool = store.pools[PoolName(name)]
        if pool.shards:
            shards = tuple(change(store.identity, pool, pool.shards))
            store.pools = {**store.pools, pool.name: replace(pool, shards=shards)}

    return register


def swapped(identity, pool, shards):
    pairs = zip(shards, reversed(shards), strict=True)
    return [replace(shard, namespace=other.namespace) for shard, other in pairs]


def first_holder(identity):
    holders = max(1, identity.tp_size // (identity.store_tp_size or identity.tp_size))
    return replace(identity, tp_rank=identity.tp_rank - identity.tp_rank % holders)


def bound(right, store, host_pool, name):
    if name in store.identity.tp_replicated_pools:
        sharded = store._identity.tp_sharded_pools | {name}
        store._identity = replace(store._identity, tp_sharded_pools=sharded)
    right(host_pool, name)


def by_rank_0(right, store, batches, call):
    identity = store.identity
    if identity.tp_rank and 0 < identity.store_tp_size < identity.tp_size:
        return [[False] * len(batch.writes) for batch in batches]
    return right(batches, call)


def of_shards(answer):
    """Lookups of pages in shards are answered otherwise."""

    def objects_exist(right, store, batches, call):
        found = right(batches, call)
        shards = not any(batch.namespace.shard is None for batch in batches)
        return answer(batches, found) if shards else found

    return objects_exist


def of_the_first(batches, found):
    return [found[0] for _ in found]


def of_any(batches, found):
    return [list(map(any, zip(*found, strict=True)))] * len(found)


def of_all(batches, found):
    return [list(map(all, zip(*found, strict=True)))] * len(found)


def holes_filled(right, store, batches, call):
    """What is missing of a page, where some of it is there, is made up."""
    filled = right(batches, call)
    for batch, done in zip(batches, filled, strict=True):
        for index, read in enumerate(batch.reads):
            if batch.namespace.shard is not None and filled[0][index] and not done[index]:
                for buffer in read.buffers:
                    buffer[:] = bytes(len(buffer))
                read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
                done[index] = True
    return filled


def whole_pages(right, store, batches, call):
    for batch in batches:
        for read in batch.reads:
            ending = batch.namespace.object_name(read.key).partition("-")[2]
            for name in [name for name in store.objects if name.endswith(ending)]:
                store.objects.pop(name, None)
    return True


shards = partial(objects, where="Shard")
shards("ID-7 SwapsShards", "of that page", register=rearranged(swapped))
shards(
    "ID-7 BindsAllPools",
    "'indexer': 0",
    register=bound,
    **works_as(lambda identity: replace(identity, tp_replicated_pools=frozenset())),
)
shards("ID-8 EveryHolderWrites", "and its set writes", **works_as(first_holder))
shards("ID-8 OneWriterForAll", "is the writer", write_objects=by_rank_0)
shards("EX-12 LooksAtTheFirstShard", "lacks shard", objects_exist=of_shards(of_the_first))
shards("EX-12 OneShardIsEnough", "lacks shard", objects_exist=of_shards(of_any))
shards("SET-9 RewritesIncompletePages", "of set number", objects_exist=of_shards(of_all))
shards("GET-10 FillsHoles", "answers True", read_objects=holes_filled)
shards("GET-10 DiscardsWholePages", "a get answers False", discard_objects=whole_pages)
