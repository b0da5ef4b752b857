"""Tests against a real SGLang. Without one they cannot be collected; deselect them with `-m "not
interop"`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.interop.engine import Rank


def pytest_ignore_collect(config):
    """Leave modules alone that need SGLang to be imported, where none of their tests is run."""
    return True if "not interop" in config.option.markexpr else None


def pytest_pycollect_makemodule():
    with warnings.catch_warnings():
        # Importing SGLang on a machine without a GPU warns of everything it misses there.
        warnings.simplefilter("ignore")
        importlib.import_module("tests.interop.engine")


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
def stores(tmp_path_factory):
    """Opens a store of a driver, which stays for the session; no test hurts its servers."""
    from tests.interop.stores import opened

    with contextlib.ExitStack() as stack:

        @functools.cache
        def store(driver: str):
            return stack.enter_context(opened(driver, tmp_path_factory.mktemp(driver)))

        yield store


@pytest.fixture(params=["file", "hf3fs", "mooncake"])
def storage(request, stores, tmp_path):
    """A driver that keeps the pages, and its configuration."""
    store, config = stores(request.param), {"path": str(tmp_path / "pages")}
    if request.param == "mooncake":
        store.clear()
        config = {}
    elif request.param == "hf3fs":
        # Each test has scopes of its own, because their names have the directory's identity in
        # them.
        config["file_size"] = "8MiB"
    return request.param, store.options | config
