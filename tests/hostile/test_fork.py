"""Children that are forked while four threads call their parent's storage (rule LC-5): none of them
may hang."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from hicache_storage.plugins import create_storage
from hicache_storage.spec import PoolTransfer, StorageForkedError
from tests.support.forking import HUNG, in_child

CHILDREN = 150
CALLERS = 4
PAGES = 4

pytestmark = pytest.mark.hostile


@pytest.fixture
def storage(kit, tmp_path):
    """A file store below the default layers, with a pool for each caller's pages and the
    child's."""
    made = create_storage("file", kit.identity(), {"path": str(tmp_path / "store")})
    pool = kit.pool(pages=(CALLERS + 1) * PAGES)
    made.register_mem_host_pool_v2(pool, "kv")
    made.open()
    yield made, pool
    made.close()


def transfer(place):
    slots = torch.arange(place * PAGES * 2, (place + 1) * PAGES * 2)
    return PoolTransfer("kv", slots, keys=[f"{place}-{page}" for page in range(PAGES)])


def used(storage, make):
    """What a child does: it is refused its parent's storage, and served by one of its own."""
    refused = 0
    for call in (
        lambda: storage.batch_exists_v2(["0-0"]),
        lambda: storage.batch_get_v2([transfer(CALLERS)]),
        lambda: storage.batch_set_v2([transfer(CALLERS)]),
        lambda: storage.delete(["0-0"]),
        storage.clear,
        storage.open,
    ):
        try:
            call()
        except StorageForkedError:
            refused += 1
    storage.get_stats()
    storage.health()
    storage.close()
    own = make()
    try:
        served = own.batch_get_v2(
            [
                PoolTransfer(
                    "kv", torch.arange(PAGES * 2), keys=[f"0-{page}" for page in range(PAGES)]
                )
            ]
        )
    finally:
        own.close()
    return f"{refused} {sum(served['kv'])}"


@pytest.mark.parametrize("interval", [None, 1e-5], ids=["usual", "10us"])
def test_children_of_a_process_that_calls(storage, kit, tmp_path, interval):
    parents, pool = storage
    usual, over, failures = sys.getswitchinterval(), threading.Event(), []

    def make():
        own = create_storage("file", kit.identity(), {"path": str(tmp_path / "store")})
        own.register_mem_host_pool_v2(pool, "kv")
        return own

    def call(place):
        while not over.is_set():
            moved = (
                parents.batch_set_v2([transfer(place)])["kv"],
                parents.batch_get_v2([transfer(place)])["kv"],
                [parents.batch_exists_v2([f"{place}-0"]).kv_hit_pages == 1],
            )
            failures.extend(answers for answers in moved if not all(answers))
            parents.get_stats()

    # There before any child looks for them.
    assert parents.batch_set_v2([transfer(0)]) == {"kv": [True] * PAGES}
    threads = [threading.Thread(target=call, args=(place,)) for place in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        if interval is not None:
            sys.setswitchinterval(interval)
        said = [in_child(lambda: used(parents, make), seconds=30.0) for _ in range(CHILDREN)]
    finally:
        over.set()
        sys.setswitchinterval(usual)
        for thread in threads:
            thread.join()
    wrong = [text for text in said if text not in {f"6 {PAGES}", HUNG}]
    print(
        f"\nforked {len(said)} children beside {CALLERS} callers: {said.count(HUNG)} hung, "
        f"{len(wrong)} were told something else"
    )
    assert (said.count(HUNG), wrong[:3], failures[:3]) == (0, [], [])
