"""Tests against a real SGLang. Without one they fail, they are not skipped; deselect them with `-m
"not interop"`."""

from __future__ import annotations

import importlib.util
import signal
import warnings
from typing import TYPE_CHECKING

import pytest

from tests.interop.missing_engine import NeedsEngine

if TYPE_CHECKING:
    from tests.interop.engine import Rank

MISSING = """SGLang is not installed here, and these tests are about nothing else.
Build an environment that has it and run them there:

    scripts/make_sglang_env.sh .venv-sglang
    .venv-sglang/bin/python -m pytest -m interop tests/interop

or leave them out with -m "not interop"."""


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("sglang") is None:
        return NeedsEngine.from_parent(parent, path=module_path, marker="interop", missing=MISSING)
    with warnings.catch_warnings():
        # Importing SGLang on a machine without a GPU warns of everything it misses there.
        warnings.simplefilter("ignore")
        importlib.import_module("tests.interop.engine")
    return None


@pytest.fixture(scope="session", autouse=True)
def world():
    """The process group of one rank that SGLang's controllers ask for."""
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ranks():
    """Makes ranks of an engine, and detaches them at the end."""
    from tests.interop.engine import Pools, Rank

    made: list[Rank] = []

    def make(pools: Pools, **options: object) -> Rank:
        made.append(Rank(pools, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.detach()


@pytest.fixture
def plain(ranks, storage):
    """A rank with KV alone, attached to `storage`."""
    from tests.interop.engine import mha_pools

    rank = ranks(mha_pools("page_first"))
    rank.attach(*storage)
    return rank


@pytest.fixture
def hybrid(ranks, storage):
    """A rank with Mamba states beside KV, attached to `storage`."""
    from tests.interop.engine import mha_pools, with_mamba

    rank = ranks(with_mamba(mha_pools("page_first")))
    rank.attach(*storage)
    return rank


@pytest.fixture
def sample(ranks, trouble):
    """A rank with KV alone, attached to the driver that `trouble` breaks."""
    from tests.interop.engine import mha_pools

    rank = ranks(mha_pools("page_first"))
    rank.attach("sample")
    return rank


@pytest.fixture
def trouble():
    """The drivers of `drivers.py` under their names, and what goes wrong in them."""
    from tests.interop.drivers import installed

    with installed() as trouble:
        yield trouble


@pytest.fixture(scope="session")
def metadata_url():
    """A metadata server in a process of its own, which keeps its state on disk."""
    from tests.interop.metadata import started

    with started() as served:
        yield served.url


@pytest.fixture
def server():
    """A metadata server of the test's own, which it may kill; in order at the end."""
    from tests.interop.metadata import problems, started

    with started() as served:
        yield served
        assert problems(served.url) == []


@pytest.fixture
def sglang_hf3fs(monkeypatch, tmp_path):
    """Attaches SGLang's own 3FS driver to ranks; takes its signal handlers away at the end."""
    from tests.interop.metadata import attach_sglang_hf3fs

    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    }

    def attach(rank: Rank, url: str, **options: int) -> object:
        return attach_sglang_hf3fs(rank, url, tmp_path, monkeypatch, **options)

    yield attach
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def mooncake_cluster():
    """A Mooncake master and a store of the session's; no test hurts them."""
    from examples.mooncake_cluster import DevCluster

    # However busy the machine is, no lease may end during a read, and no store may seem dead.
    with DevCluster(1, 64 << 20, client_ttl_seconds=60, lease_milliseconds=30_000) as cluster:
        yield cluster


@pytest.fixture
def mooncake_options(mooncake_cluster):
    """Options for an empty store."""
    from hicache_backends.mooncake.client.handle import connections
    from hicache_backends.mooncake.config import MooncakeConfig, client_settings

    connection = connections.acquire(client_settings(MooncakeConfig(**mooncake_cluster.options)))
    connection.remove_prefix("")
    connections.release(connection)
    return mooncake_cluster.options


@pytest.fixture(params=["file", "hf3fs", "mooncake"])
def storage(request, tmp_path):
    """A driver that keeps the pages, and its configuration."""
    if request.param == "mooncake":
        return request.param, request.getfixturevalue("mooncake_options")
    config = {"path": str(tmp_path / "pages")}
    if request.param == "hf3fs":
        # Each test has scopes of its own, because their names have the directory's identity in
        # them.
        config |= {"metadata_url": request.getfixturevalue("metadata_url"), "file_size": "8MiB"}
    return request.param, config
