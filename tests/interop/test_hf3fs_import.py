"""What SGLang's own server process has saved is taken over by `hicache metadata import`: the same
answers, and the same pages."""

from __future__ import annotations

import json

import pytest
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsGlobalMetadataClient

from tests.interop.engine import PAGE_SIZE, mamba_pool, mha_pools, tokens
from tests.interop.metadata import live, sglang_started, started, wait_until_saved
from tests.support.commands import run_hicache

pytestmark = [
    pytest.mark.interop,
    pytest.mark.long,
    # SGLang's mock client reads into bytes, of which torch makes a tensor; that is told once in a
    # process.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

PAGES = 6


def run(*words):
    """A command of the server's operator; what it prints."""
    done = run_hicache("metadata", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def take_over(file, store):
    said = run("import", file, "--store", f"sqlite:///{store}")
    run("fsck", "--store", f"sqlite:///{store}")
    return said


def with_mamba():
    pools = mha_pools("page_first")
    pools.side["mamba"] = mamba_pool("page_first")
    return pools


@pytest.mark.parametrize("form", ["rank and namespace", "bare rank"])
def test_the_answers_are_the_same(tmp_path, form):
    file, store = tmp_path / "metadata.json", tmp_path / "m.db"
    namespaces = ("kv", "mamba") if form == "rank and namespace" else ("kv",)
    scopes = [(rank, namespace) for rank in range(2) for namespace in namespaces]
    asked, told = {}, {}
    with sglang_started(file) as server:
        client = Hf3fsGlobalMetadataClient(server.url)
        for rank, namespace in scopes:
            keys = [f"{rank}-{namespace}-{number}" for number in range(150)]
            client.initialize(rank, 200, namespace)
            reserved = client.reserve_and_allocate_page_indices(
                rank, [(key, "") for key in keys], namespace
            )
            pairs = [(key, slot) for key, (_, slot) in zip(keys, reserved, strict=True)]
            client.confirm_write(rank, pairs[:140], [slot for _, slot in pairs[140:]], namespace)
            client.delete_keys(rank, keys[20:40], namespace)
            asked[rank, namespace] = keys
            told[rank, namespace] = client.get_page_indices(rank, keys, namespace)
        wait_until_saved(file, {f"{rank}:{namespace}": 120 for rank, namespace in scopes})
    if form == "bare rank":
        # As versions before there were namespaces have written it.
        file.write_text(
            json.dumps(
                {
                    name.removesuffix(":kv"): rank
                    for name, rank in json.loads(file.read_text()).items()
                }
            )
        )
    said = take_over(file, store)
    assert sorted(said.splitlines()) == [
        f"{rank}:{namespace}: 120 pages in 200 slots" for rank, namespace in sorted(scopes)
    ]
    with started(store) as server:
        client = Hf3fsGlobalMetadataClient(server.url)
        for (rank, namespace), keys in asked.items():
            client.initialize(rank, 200, namespace)
            assert client.get_page_indices(rank, keys, namespace) == told[rank, namespace]
            assert client.exists(rank, keys, namespace) == [
                slot is not None for slot in told[rank, namespace]
            ]


def test_an_engine_goes_on_with_its_pages(ranks, sglang_hf3fs, tmp_path):
    """SGLang's driver has written them with SGLang's server, and reads them with ours."""
    file, store = tmp_path / "metadata.json", tmp_path / "m.db"
    rank = ranks(with_mamba())
    with sglang_started(file) as server:
        sglang_hf3fs(rank, server.url)
        backup = rank.backup(tokens(PAGES), checkpoints={"mamba": 1})
        wait_until_saved(file, {"0:kv": 2 * PAGES, "0:mamba": 1})
        rank.detach()
    take_over(file, store)
    with started(store) as server:
        assert live(server.url) == {"0:kv": 2 * PAGES, "0:mamba": 1}
        sglang_hf3fs(rank, server.url)
        rank.wipe()
        result = rank.prefetch(tokens(PAGES), windows={"mamba": 1})
        assert result.completed_tokens == PAGES * PAGE_SIZE
        assert rank.delivered(result, backup)
        assert rank.delivered(result, backup, "mamba")
        rank.wipe()
        other = rank.backup(tokens(PAGES, start=900), checkpoints={"mamba": 1})
        rank.wipe()
        assert rank.delivered(rank.prefetch(tokens(PAGES), windows={"mamba": 1}), backup)
        rank.wipe()
        assert rank.delivered(rank.prefetch(tokens(PAGES, start=900), windows={"mamba": 1}), other)
        rank.detach()
