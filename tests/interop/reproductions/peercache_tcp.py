"""What matrix.md says about `peercache`, shown with the driver alone: `python peercache_tcp.py [RULE]...`"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine import (
    all_pages,
    config,
    holds,
    kv_pool,
    last_page,
    mamba_pool,
    meet,
    put,
    put_side,
    slots,
    too_short,
    with_states,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from shows import main, shows

JOINING_SECONDS = 0.5


class Cluster:
    """A metadata server, and the nodes that it has introduced to each other."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        program = Path(sys.executable).with_name("peercache-meta")
        self.server = subprocess.Popen([program, "--bind", self.address], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(self.address.split(":")).close()
                return
            except OSError:
                time.sleep(0.05)

    def __call__(self, pool, **changes):
        """A rank with a host pool, known to all others."""
        from peercache.store import PeerCacheStore

        extra = {
            "interface_v1": 1,
            "discovery_addr": self.address,
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
            "heartbeat_interval": 0.1,
            "global_segment_size": "16mb",
            "disk_path": tempfile.mkdtemp(prefix="reproduction-"),
            "disk_size": "64mb",
            "metrics_enabled": False,
        }
        store = PeerCacheStore(config(extra, **changes), {})
        store.register_mem_pool_host(pool)
        time.sleep(JOINING_SECONDS)
        return store


@shows("ID-1")
def models_meet(make):
    """A page of one model is delivered to another, and one of TP size 4 to TP size 8."""
    meet(make, {"model_name": "one"}, {"model_name": "other"})
    meet(make, {"tp_size": 4}, {"tp_size": 8})


@shows("ID-3")
def shards_of_another_size_meet(make):
    """A state that is sharded over 2 ranks is delivered to one that is sharded over 4."""
    pool, states = kv_pool(), mamba_pool()
    two = make(pool, tp_rank=1, tp_size=2, is_mla_model=True)
    four = make(pool, tp_rank=1, tp_size=4, is_mla_model=True)
    for store in (two, four):
        store.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert put_side(two, states, PoolName.MAMBA, ["k"], value=2)
    read = PoolTransfer(PoolName.MAMBA, slots(3), keys=["k"])
    assert four.batch_get_v2([read])[PoolName.MAMBA] == [True]
    assert holds(states, 3, 2)


@shows("ID-4")
def context_parallel_ranks_meet(make):
    """The first rank of context parallelism is delivered the page of the second."""
    meet(make, {"attn_cp_rank": 1, "attn_cp_size": 2}, {"attn_cp_rank": 0, "attn_cp_size": 2})


@shows("EX-1", "EX-2")
def an_empty_side_pool_does_not_count(make):
    """A side pool that is needed whole and has nothing does not lower the hit."""
    store, _, keys = with_states(make, 3, "ex2")
    assert store.batch_exists_v2(keys, [all_pages(PoolName.MAMBA)]).kv_hit_pages == 3


@shows("EX-1", "EX-3")
def a_window_is_looked_up_by_its_placeholder(make):
    """A side pool of which the last page is needed and that has all makes the hit 0."""
    store, states, keys = with_states(make, 3, "ex3")
    assert put_side(store, states, PoolName.MAMBA, keys)
    assert store.batch_exists_v2(keys, [last_page(PoolName.MAMBA)]).kv_hit_pages == 0


@shows("EX-9", "SET-3")
def an_unreadable_page_stays(make):
    """A page that is too short to be read goes on existing, and a set does not repair it."""
    store, whole = too_short(make)
    assert put(store, whole, ["short"])
    assert store.batch_get_v1(["short"], slots(3)) == [False]


@shows("LC-4")
def a_cleared_page_is_delivered(make):
    """A page that was looked up is delivered after it has been cleared."""
    pool = kv_pool()
    store = make(pool)
    assert put(store, pool, ["gone"])
    assert store.batch_exists(["gone"]) == 1
    store.clear()
    assert store.batch_get_v1(["gone"], slots(3)) == [True]


@shows("LC-4", "GET-1")
def a_page_of_another_node_is_delivered(make):
    """A page that another rank of equal identity has set is delivered after a clear."""
    pool = kv_pool()
    writer, store = make(pool), make(pool)
    assert put(writer, pool, ["theirs"])
    store.clear()
    assert store.batch_get_v1(["theirs"], slots(3)) == [True]


@shows("GET-1")
def another_page_is_delivered(make):
    """A page that was looked up and cleared is delivered with the bytes of the page behind it."""
    pool = kv_pool()
    store = make(pool)
    assert put(store, pool, ["before"], value=1)
    assert store.batch_exists(["before"]) == 1
    store.clear()
    assert put(store, pool, ["behind"], value=2)
    assert store.batch_get_v1(["before"], slots(3)) == [True]
    assert holds(pool, 3, 2)


if __name__ == "__main__":
    cluster = Cluster()
    main(cluster, finish=cluster.server.kill)
