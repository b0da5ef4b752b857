"""SGLang's own 3FS driver, unchanged, with its client and its mock file client, against our
metadata server.

What is read has no holes before its last page: at a hole this driver puts pages into each other's
places, whatever the server (D7).
"""

from __future__ import annotations

import importlib.metadata
import itertools
import time

import pytest
import torch
from sglang.srt.mem_cache.storage.hf3fs.hf3fs_client import Hf3fsMockClient
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsGlobalMetadataClient
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

from tests.interop.engine import (
    PAGE_SIZE,
    mha_pools,
    mla_pools,
    pages,
    scribble,
    tokens,
    tp,
    wipe,
    with_mamba,
)
from tests.interop.metadata import WAIT_SECONDS, live

pytestmark = [
    pytest.mark.interop,
    # Its mock client reads into bytes, of which torch makes a tensor; that is told once in a
    # process.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

PAGES = 6
TWO_RANKS = [tp(number) for number in range(2)]


@pytest.fixture
def attached(ranks, server, sglang_hf3fs):
    """Makes a rank whose storage is SGLang's driver."""

    def attach(pools, parallel=None, **options):
        rank = ranks(pools, **(parallel or {}))
        driver = sglang_hf3fs(rank, server.url, **options)
        return rank, driver

    return attach


def keys(count, mark=""):
    return [f"{mark}{number:064x}" for number in range(count)]


def indices(count):
    return torch.arange(count * PAGE_SIZE)


def store(rank, driver, names, seed=1):
    """Write pages of random bytes; their contents."""
    scribble(rank.pools.kv, seed)
    assert all(driver.batch_set_v1(names, indices(len(names))))
    return pages(rank.pools.kv, indices(len(names)))


def fetch(rank, driver, names):
    """Read pages; those that arrived, and None for others."""
    wipe(rank.pools.kv)
    answer = driver.batch_get_v1(names, indices(len(names)))
    found = pages(rank.pools.kv, indices(len(names)))
    return [page if there else None for page, there in zip(found, answer, strict=True)]


def same(found, expected):
    return all(
        page is not None and torch.equal(page, wanted)
        for page, wanted in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("make_pools", "layout", "slots", "states"),
    [
        pytest.param(mha_pools, "page_first", 2, 1, id="mha, K and V in slots of their own"),
        pytest.param(mha_pools, "layer_first", 1, 0, id="mha, staged"),
        pytest.param(mla_pools, "page_first_direct", 1, 0, id="mla"),
    ],
)
def test_pages_of_the_controller_come_back(attached, server, make_pools, layout, slots, states):
    """Also from a server that was killed; states of Mamba have a scope beside that of KV."""
    pools, windows = make_pools(layout), {"mamba": 1} if states else {}
    rank, driver = attached(with_mamba(pools) if states else pools)
    assert importlib.metadata.version("sglang") == "0.5.23"
    assert type(driver) is HiCacheHF3FS
    assert type(driver.metadata_client) is Hf3fsGlobalMetadataClient
    assert {type(client) for client in driver.clients} == {Hf3fsMockClient}
    backup = rank.backup(tokens(PAGES), checkpoints=windows)
    assert backup.completed_tokens == PAGES * PAGE_SIZE
    assert backup.pool_hits == windows
    scopes = {"0:kv": PAGES * slots, **({"0:mamba": 1} if states else {})}
    assert live(server.url) == scopes
    assert rank.restores(backup, **windows)
    server.kill()
    server.start()
    assert rank.restores(backup, **windows)
    if states:
        # A hit needs both.
        driver.metadata_client.clear(0, namespace="mamba")
        rank.wipe()
        assert rank.prefetch(tokens(PAGES), windows=windows).hit_tokens == 0
        rank.backup(tokens(PAGES), checkpoints=windows)
        assert live(server.url) == scopes
    driver.clear()
    assert set(live(server.url).values()) == {0}


@pytest.mark.parametrize("make_pools", [mha_pools, mla_pools])
def test_set_exists_get_delete_clear(attached, make_pools):
    rank, driver = attached(make_pools("page_first"))
    names = keys(PAGES)
    for seed in (1, 2):
        assert driver.batch_exists(names) == 0
        assert fetch(rank, driver, names) == [None] * PAGES
        contents = store(rank, driver, names, seed=seed)
        # It is there, and not written again.
        store(rank, driver, names, seed=seed + 10)
        assert driver.batch_exists([*names, "another"]) == PAGES
        assert driver.batch_exists(["another", *names]) == 0
        found = fetch(rank, driver, [*names, "another"])
        assert found.pop() is None
        assert same(found, contents)
        # Its `delete` knows the keys of pools with one part a page only; those of MHA, K and V, it
        # never finds.
        if make_pools is mla_pools:
            driver.delete(names[2])
            driver.delete("nobody's")
            assert not driver.exists(names[2])
            assert driver.batch_exists(names) == 2
            assert fetch(rank, driver, [names[2]]) == [None]
            assert same(fetch(rank, driver, names[3:]), contents[3:])
        driver.clear()


def test_ranks_of_replicated_kv_share_one_scope(attached, server):
    writer, reader = [attached(mla_pools("page_first"), parallel) for parallel in TWO_RANKS]
    contents = store(*writer, keys(PAGES))
    assert live(server.url) == {"0:kv": PAGES}
    assert same(fetch(*reader, keys(PAGES)), contents)


def test_more_pages_than_the_file_has(attached, server):
    """SGLang's own server fails every call after such a batch (D4); here old pages make room, and
    none is another's."""
    pools = mla_pools("page_first")
    page_bytes = pools.kv.get_ksize_per_token() * PAGE_SIZE
    rank, driver = attached(pools, file_size=4 * page_bytes)
    written = {}
    deadline = time.monotonic() + WAIT_SECONDS
    # What is evicted rests for a while before its slot is given away, and a fast machine is through
    # with ten batches by then.
    for batch in itertools.count():
        if batch >= 10 and len(written) > 4:
            break
        assert time.monotonic() < deadline, "no page of a later batch was ever stored"
        names = keys(PAGES, f"{batch}-")
        scribble(rank.pools.kv, batch)
        answer = driver.batch_set_v1(names, indices(PAGES))
        contents = pages(rank.pools.kv, indices(PAGES))
        written |= {
            name: page for name, page, stored in zip(names, contents, answer, strict=True) if stored
        }
        found = {name: fetch(rank, driver, [name])[0] for name in written}
        assert all(page is None or torch.equal(page, written[name]) for name, page in found.items())
        assert sum(page is not None for page in found.values()) == live(server.url)["0:kv"] <= 4
