"""`hicache why`: situations made for real, each asked by one command, on `file` and on `hf3fs`."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest
import torch

from hicache_storage.plugins import create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool
from hicache_storage.spec import PoolTransfer
from hicache_storage.testing import BytePool
from tests.conftest import make_identity
from tests.metadata_server.servers import SERVE
from tests.support.commands import run_here
from tests.support.metadata import Served

KEYS = ["k0", "k1", "k2", "k3"]
ENGINE = {"model": "m", "kv_dtype": "bfloat16", "page_size": 2, "layout": "page_first"}


@pytest.fixture(scope="module")
def server():
    with Served(command=f"{SERVE} --quarantine-seconds 0.05 --lease-seconds 1") as served:
        yield served


class AskedStore:
    """A store, engines that use it, and the question about it."""

    def __init__(self, driver, path, options):
        self.driver = driver
        self.path = path
        self.options = {"path": str(path), **options}

    @contextmanager
    def engine(self, pools, **changes):
        """Open a storage as an engine does, with its pools, under an identity."""
        with create_storage(self.driver, make_identity(**changes), self.options) as storage:
            for name, pool in pools.items():
                storage.register_mem_host_pool_v2(pool, name)
            yield storage

    def set(self, keys=KEYS, pools=("kv",), **changes):
        made = {name: BytePool() for name in pools}
        with self.engine(made, **changes) as storage:
            transfers = [pool.transfer(name, keys, range(len(keys))) for name, pool in made.items()]
            for page in range(len(keys)):
                made["kv"].fill(page, page)
            answers = storage.batch_set_v2(transfers)
            assert answers == {name: [True] * len(keys) for name in pools}

    def why(self, *keys, **fields):
        """Ask, with a file of an engine's identity unless told otherwise; return the report."""
        identity = self.path.with_name("identity.json")
        identity.write_text(json.dumps({**ENGINE, **fields}))
        done = self.run(*keys, "--identity", str(identity), "--json")
        assert done.exit_code in (0, 1), done.output
        report = json.loads(done.stdout)
        there = [one["answer"] == "there" for one in report["answers"]]
        assert done.exit_code == (0 if all(there) else 1) or not there
        return report

    def answer(self, key, **fields):
        [one] = self.why(key, **fields)["answers"]
        return one["answer"], one["detail"]

    def run(self, *words):
        options = [word for each in self.options.items() for word in ("-c", "=".join(each))]
        return run_here("why", "--driver", self.driver, *options, *words)

    def damage(self, page):
        """Overwrite the bytes of a page, wherever they lie on the disk."""
        for path in self.path.rglob("*"):
            if path.is_file() and (at := path.read_bytes().find(page)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at + 3)
                    file.write(b"\xff\xff")
                return
        raise AssertionError("the page is nowhere")


@pytest.fixture(params=["file", "hf3fs"])
def store(request, tmp_path):
    if request.param == "file":
        return AskedStore("file", tmp_path / "store", {})
    url = request.getfixturevalue("server").url
    return AskedStore("hf3fs", tmp_path / "store", {"metadata_url": url, "file_size": "1MiB"})


# Situations
# --------------------------------------------------------------------------------------------------


def test_there(store):
    store.set()
    assert store.answer("k1") == ("there", "kv")
    whole = asdict(make_identity()) | {"tp_sharded_pools": [], "tp_replicated_pools": []}
    assert store.answer("k1", **whole) == ("there", "kv")


def test_never_stored(store):
    assert store.answer("x") == ("never stored", "no page of this identity was")
    store.set()
    assert store.answer("x") == ("never stored", "as far as the store remembers")


@pytest.mark.parametrize(
    ("field", "stored", "asked"),
    [("kv_dtype", "bfloat16", "fp8_e4m3"), ("tp_size", 1, 2), ("revision", "", "r2")],
)
def test_an_engine_that_was_restarted_with_another(store, field, stored, asked):
    store.set(**{field: stored})
    # The new engine has stored pages of its own since.
    store.set(["new"], **{field: asked})
    said = f"stored with {field} {stored!r} and not {asked!r}"
    assert store.answer("k1", **{field: asked}) == ("other identity", said)
    table = store.run("--identity", json.dumps({**ENGINE, field: asked}))
    assert table.exit_code == 0
    assert f"{field} {stored!r} and not {asked!r}" in table.output


def test_damaged(store):
    store.set()
    store.damage(BytePool().fill(1, 1))
    said = "kv: a page whose checksum does not fit its bytes"
    assert store.answer("k1") == ("damaged", said)
    # The question has not removed it, and the others are whole.
    assert store.answer("k1")[0] == "damaged"
    assert store.answer("k2")[0] == "there"


def test_removed(store):
    store.set()
    with store.engine({"kv": BytePool()}) as storage:
        began = time.time() - 1
        assert storage.delete(["k1"]) == [True]
    answer, detail = store.answer("k1")
    assert (answer, detail.split()[:2]) == ("removed", ["kv:", "deleted"])
    assert began <= datetime.fromisoformat(" ".join(detail.split()[2:4])).timestamp() <= time.time()
    # It may be found under another identity all the same.
    store.set(["k1"], revision="r2")
    assert "; stored with revision 'r2' and not ''" in store.answer("k1", revision="")[1]
    store.set(["k1"])
    assert store.answer("k1")[0] == "there"
    with store.engine({"kv": BytePool()}) as storage:
        # The file driver remembers pages whose index it has read.
        assert all(storage.batch_present(KEYS))
        storage.clear()
    answer, detail = store.answer("k2")
    assert (answer, detail.split()[:2]) == ("removed", ["kv:", "cleared"])


def test_evicted(store):
    if store.driver == "file":
        store.options["capacity"] = "64KiB"
    else:
        store.options["file_size"] = str(40 * (BytePool().geometry.page_bytes + 64))
    keys = [f"old{number}" for number in range(8)]
    store.set(keys)
    for turn in range(100):
        store.set([f"new{turn} {number}" for number in range(8)])
    answers = store.why(*keys)["answers"]
    assert {(one["answer"], one["detail"].split()[1]) for one in answers} == {
        ("removed", "evicted")
    }


def test_a_side_pool_is_missing(store):
    store.set(pools=["kv", "indexer"], keys=["k0"])
    store.set(keys=["k1"])
    assert store.answer("k0") == ("there", "kv, indexer")
    assert store.answer("k1") == ("incomplete", "indexer: never stored")


def test_a_rank_is_missing(store):
    store.set(tp_size=2, tp_rank=0)
    said = "kv tp_rank 1: never stored"
    assert store.answer("k1", tp_size=2) == ("incomplete", said)
    assert store.answer("k1", tp_size=2, tp_rank=0) == ("there", "kv tp_rank 0")
    store.set(tp_size=2, tp_rank=1)
    assert store.answer("k1", tp_size=2) == ("there", "kv tp_rank 0, kv tp_rank 1")


def test_shards_are_missing(store):
    shape = AttentionGeometry(layers=range(2), head_num=2, head_dim=8, dtype=torch.bfloat16)
    pool = PagedHostPool(shape, size=8, page_size=2, layout="page_head", pin_memory=False)
    half = {"layout": "page_head", "store_tp_size": 4, "tp_size": 2}
    with store.engine({"kv": pool}, **half) as storage:
        storage.batch_set_v2([PoolTransfer("kv", torch.arange(4), keys=KEYS[:2])])
    # The heads of the other rank are asked for by an engine of TP size 1 alone.
    assert store.answer("k1", **half) == ("there", "kv shard 0, kv shard 1")
    said = "kv shard 2: never stored, kv shard 3: never stored"
    assert store.answer("k1", **half | {"tp_size": 1}) == ("incomplete", said)


def test_sets_are_refused(store, monkeypatch):
    store.set()
    found = os.statvfs

    def full(path):
        values = list(found(path))
        values[3:5] = 0, 0
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    answer, detail = store.answer("x")
    assert answer == "never stored"
    assert "the store takes no sets: " in detail
    assert "full" in detail
    assert store.answer("k1") == ("there", "kv")


# Questions
# --------------------------------------------------------------------------------------------------


def test_a_field_that_is_not_given_may_have_any_value(store):
    store.set(["a"], revision="1")
    store.set(["b"], revision="2")
    done = store.run("a", "b", "x", "--json")
    assert [(one["answer"], one["detail"]) for one in json.loads(done.stdout)["answers"]] == [
        ("there", "kv; with revision '1', one of 2 identities with the given fields"),
        ("there", "kv; with revision '2', one of 2 identities with the given fields"),
        (
            "never stored",
            "as far as the store remembers; under none of 2 identities with the given fields",
        ),
    ]
    assert done.exit_code == 1


def test_the_command_line_of_an_engine(tmp_path):
    store = AskedStore("file", tmp_path / "store", {})
    store.set(revision="r1", tp_size=2)
    store.set(revision="r1", tp_size=2, tp_rank=1)
    tier = {
        "type": "HiCacheTier",
        "module_path": "hicache_storage.engines.vllm",
        "driver": "file",
        "driver_config": store.options,
        "revision": "r1",
    }
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    command = ["vllm", "serve", "m", "--kv-transfer-config", json.dumps(transfer)]
    done = run_here("why", "k1", *command, "--tensor-parallel-size", "2")
    assert done.exit_code == 0
    assert done.stdout.split()[:5] == ["key", "answer", "reason", "k1", "there"]
    done = run_here("why", "k1", *command)
    assert done.exit_code == 1
    assert "stored with tp_size 2 and not 1" in done.stdout
    extra = tmp_path / "hicache.json"
    extra.write_text(json.dumps({"driver": "file", "driver_config": store.options}))
    sglang = ["sglang", "--model-path", "m", "--tp", "2"]
    done = run_here("why", "k1", *sglang, "--hicache-storage-backend-extra-config", f"@{extra}")
    assert done.exit_code == 1
    assert "stored with revision 'r1' and not ''" in done.stdout
    adapter = {"module_path": "hicache_storage.engines.lmcache", "adapter_params": tier}
    done = run_here("why", "k1", "lmcache", "server", "--l2-adapter", json.dumps(adapter))
    assert "stored with layout 'page_first' and not 'lmcache'" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["k"], "name a --driver"),
        (["k", "--driver", "nosuch"], "nosuch"),
        (["k", "--driver", "file", "-c", "path={tmp}", "--identity", '{"tpsize": 2}'], "'tp_size'"),
        (["k", "--driver", "file", "-c", "path={tmp}", "--identity", '{"tp_size": "2"}'], "int"),
        (["k", "--driver", "file", "-c", "path={tmp}", "--identity", '{"tp'], "--identity is no"),
        (["k", "--driver", "file", "-c", "path={tmp}", "--identity", "gone.json"], "gone.json"),
        (["k", "--driver", "hf3fs", "-c", "path={tmp}"], "hicache metadata serve"),
        (["k", "--driver", "dictionary"], "to no other process"),
        (
            ["k", "--driver", "hf3fs", "-c", "path={tmp}", "-c", "metadata_url=http://127.0.0.1:9"],
            "does not answer",
        ),
        (["k", "sglang", "--model-path", "m"], "name a --driver"),
    ],
)
def test_what_cannot_be_asked(tmp_path, site, words, said):
    site.here("dictionary")
    done = run_here("why", *[word.replace("{tmp}", str(tmp_path)) for word in words])
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_description_that_is_none_is_left_out(tmp_path):
    store = AskedStore("file", tmp_path / "store", {})
    store.set()
    [description] = Path(store.path).rglob("namespace.json")
    text = description.read_bytes()
    for other in (b"", b"[]", b"{}", text.replace(b'"m"', b'"other"')):
        description.write_bytes(other)
        assert store.why("k1")["identities"] == []
    description.write_bytes(text)
    assert store.answer("k1")[0] == "there"
