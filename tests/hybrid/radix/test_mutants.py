"""The random programs notice what they are there to notice: with one rule broken, they fail."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hicache_storage.hybrid.radix import HiMambaRadixCache
from hicache_storage.hybrid.radix.prefixes import PrefixMatcher
from hicache_storage.hybrid.radix.slots import LRUList, SlotLocks
from hicache_storage.hybrid.radix.tree import SlotKind
from hicache_storage.hybrid.radix.write_back import NodeWriteBack
from hicache_storage.hybrid.storage_io.prefetch import Prefetcher, PrefetchPhase
from hicache_storage.transfer import PageTransfers
from tests.hybrid.programs import assert_found
from tests.hybrid.radix.test_programs import Fetches, Programs

pytestmark = pytest.mark.long


class Mutant(NamedTuple):
    owner: object
    name: str
    broken: object
    programs: type[Fetches] = Programs


def nothing(*arguments, **options):
    pass


def evict_without_launching(cache, tokens=0, states=0):
    return cache._ownership.evict(cache._ownership.device, tokens, states)


def store_at_once(backups, node):
    for each in reversed(list(node.upward())):
        if each.host[SlotKind.KV].indices is not None:
            backups._store(each)


def unlock_kv_only(locks, *lists):
    RELEASE(locks, *(lists or [lru for lru in locks.nodes if lru.kind is SlotKind.KV]))


def unlock_device_only(locks, *lists):
    RELEASE(locks, *(lists or [lru for lru in locks.nodes if lru.tier == "device"]))


def refresh_kv_only(cache, node):
    for tier in cache._ownership.tiers:
        tier[SlotKind.KV].touch(node)


def refresh_all_states(lru, node):
    for each in node.upward():
        if each in lru.order:
            lru.order.move_to_end(each)


def free_twice(lru, slots):
    FREE(lru, slots)
    FREE(lru, slots)


def end_without_freeing(cache, request_id):
    running = cache._prefetches.get(request_id)
    if running is not None and not running.is_wanted():
        del cache._prefetches[request_id]
        cache._controller.prefetcher.terminate(running.operation)
        return 0
    return END(cache, request_id)


def finish_without_freeing(prefetcher, operation, pages):
    if pages:
        FINISH(prefetcher, operation, pages)
    operation.phase, operation.delivered = PrefetchPhase.DONE, pages
    operation.buffers = operation.buffers if pages else None


def lock_no_host(locks, nodes):
    """Of a load: of all locks of slots on both tiers, only those on the device."""
    on_device = {lru: node for lru, node in nodes.items() if lru.tier == "device"}
    INIT(locks, on_device if len(nodes) == 3 else nodes)


RELEASE, INIT, FREE, END, FINISH = (
    SlotLocks.release,
    SlotLocks.__init__,
    LRUList.free,
    HiMambaRadixCache.end_prefetch,
    Prefetcher._finish,
)
MUTANTS = {
    "copies are launched after what they read was given away": Mutant(
        HiMambaRadixCache, "evict", evict_without_launching
    ),
    "slots are overwritten under a copy": Mutant(PageTransfers, "before_overwrite", nothing),
    "slots that nobody needs are kept": Mutant(LRUList, "free", nothing),
    "slots are given back twice": Mutant(LRUList, "free", free_twice),
    "states are not asked for": Mutant(PrefixMatcher, "_usable", lambda *_, **__: True),
    "pages are stored before they are on the host": Mutant(
        NodeWriteBack, "_store_path", store_at_once
    ),
    "locked nodes are evicted": Mutant(LRUList, "least_recent", lambda lru: next(iter(lru), None)),
    "a state stays locked": Mutant(SlotLocks, "release", unlock_kv_only),
    "what was copied stays locked": Mutant(SlotLocks, "release", unlock_device_only),
    "what is loaded is not kept on the host": Mutant(SlotLocks, "__init__", lock_no_host),
    "a use does not refresh": Mutant(LRUList, "touch", nothing),
    "a use does not refresh its state": Mutant(HiMambaRadixCache, "_refresh", refresh_kv_only),
    "a use refreshes the states on the way": Mutant(LRUList, "touch", refresh_all_states),
    "what has no place keeps its slots": Mutant(
        HiMambaRadixCache, "end_prefetch", end_without_freeing, Fetches
    ),
    "a prefetch that failed keeps its slots": Mutant(
        Prefetcher, "_finish", finish_without_freeing, Fetches
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_programs_notice(monkeypatch, mutant):
    broken = MUTANTS[mutant]
    monkeypatch.setattr(broken.owner, broken.name, broken.broken)
    assert_found(broken.programs)
