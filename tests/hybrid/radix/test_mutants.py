"""The random programs notice what they are there to notice: with one rule broken, they fail."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_storage.hybrid.radix import HiMambaRadixCache
from hicache_storage.hybrid.radix.backups import Backups
from hicache_storage.hybrid.radix.locks import Locks
from hicache_storage.hybrid.radix.lru import LRUList
from hicache_storage.hybrid.radix.nodes import Kind
from hicache_storage.hybrid.radix.residency import Residency
from tests.hybrid.radix.standin import StandInController
from tests.hybrid.radix.test_programs import SETTINGS, Programs


def evict_without_launching(cache, tokens=0, states=0):
    return cache._eviction.device(tokens, states)


def store_at_once(backups, node):
    for each in reversed(list(node.upward())):
        if each.host[Kind.KV].indices is not None:
            backups._store(each)


def unlock_kv_only(locks, held):
    held.device_state = held.host_state = False
    UNDO(locks, held)


UNDO = Locks._undo
MUTANTS = {
    "copies are launched after what they read was given away": (HiMambaRadixCache, "evict", evict_without_launching),
    "slots are overwritten under a copy": (StandInController, "before_overwrite", lambda controller, device: None),
    "rows that nobody needs are kept": (Residency, "_give_back_others", lambda residency, tier, held, rows: None),
    "states are not asked for": (Residency, "has_state", lambda residency, node: True),
    "pages are stored before they are on the host": (Backups, "_store_path", store_at_once),
    "locked nodes are evicted": (LRUList, "oldest", lambda lru: next(iter(lru), None)),
    "a state stays locked": (Locks, "_undo", unlock_kv_only),
    "a use does not refresh": (LRUList, "touch", lambda lru, node: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_programs_notice(monkeypatch, mutant):
    owner, name, broken = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, broken)
    quick = settings(
        SETTINGS, max_examples=400, phases=[Phase.generate], database=None, derandomize=True, report_multiple_bugs=False,
        print_blob=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError)):
        run_state_machine_as_test(Programs, settings=quick)
