"""SGLang's own 3FS driver, unchanged, with its client and its mock file client, against our
metadata server.

What is read has no holes before its last page: at a hole this driver puts pages into each other's
places, whatever the server (D7).
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import signal
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
from tests.interop.stores import live, opened

pytestmark = [
    pytest.mark.interop,
    # Its mock client reads into bytes, of which torch makes a tensor; that is told once in a
    # process.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

PAGES, PATIENCE_SECONDS = 6, 60.0


@pytest.fixture
def server(tmp_path):
    """A metadata server of the test's own, in order at the end."""
    with opened("hf3fs", tmp_path) as store:
        yield store.server


@pytest.fixture
def attached(ranks, server, tmp_path, monkeypatch):
    """Attaches SGLang's driver to ranks as an engine does: named `hf3fs`, told the rest by a file, with
    its mock client. Its signal handlers go at the end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    file = tmp_path / "hf3fs.json"
    monkeypatch.setenv("SGLANG_HICACHE_HF3FS_CONFIG_PATH", str(file))

    def attach(pools, parallel=None, *, file_size=1 << 20):
        options = {"file_size": file_size, "numjobs": 2, "entries": 8}
        place = {"file_path_prefix": str(tmp_path / "sglang"), "metadata_server_url": server.url}
        file.write_text(json.dumps(options | place))
        rank = ranks(pools, **(parallel or {}))
        rank.attach_config({"use_mock_hf3fs_client": True}, backend="hf3fs")
        return rank, rank.controller.storage_backend

    yield attach
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_ranks_of_replicated_kv_share_one_scope(attached, server):
    (writer, _), (reader, _) = [attached(mla_pools("page_first"), tp(rank)) for rank in range(2)]
    backup = writer.backup(tokens(PAGES))
    assert live(server.url) == {"0:kv": PAGES}
    assert reader.restores(backup)


def test_more_pages_than_the_file_has(attached, server):
    """SGLang's own server fails every call after such a batch (D4); here old pages make room, and
    none is another's."""
    pools = mla_pools("page_first")
    page_bytes = pools.kv.get_ksize_per_token() * PAGE_SIZE
    rank, driver = attached(pools, file_size=4 * page_bytes)
    written, indices = {}, torch.arange(PAGES * PAGE_SIZE)

    def fetch(name):
        wipe(rank.pools.kv)
        [there] = driver.batch_get_v1([name], indices[:PAGE_SIZE])
        return pages(rank.pools.kv, indices[:PAGE_SIZE])[0] if there else None

    deadline = time.monotonic() + PATIENCE_SECONDS
    # What is evicted rests for a while before its slot is given away, and a fast machine is through
    # with ten batches by then.
    for batch in itertools.count():
        if batch >= 10 and len(written) > 4:
            break
        assert time.monotonic() < deadline, "no page of a later batch was ever stored"
        names = [f"{batch}-{number:064x}" for number in range(PAGES)]
        scribble(rank.pools.kv, batch)
        contents = pages(rank.pools.kv, indices)
        stored = driver.batch_set_v1(names, indices)
        written |= dict(itertools.compress(zip(names, contents, strict=True), stored))
        found = {name: fetch(name) for name in written}
        assert all(page is None or torch.equal(page, written[name]) for name, page in found.items())
        assert sum(page is not None for page in found.values()) == live(server.url)["0:kv"] <= 4
