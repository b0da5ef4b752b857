"""Tests against a real vLLM. Without one they cannot be collected; deselect them with `-m "not
vllm"`."""

from __future__ import annotations

import importlib
import warnings

import pytest


def pytest_ignore_collect(config):
    """Leave modules alone that need vLLM to be imported, where none of their tests is run."""
    return True if "not vllm" in config.option.markexpr else None


def pytest_pycollect_makemodule(module_path):
    # Others have them imported by processes of their own, and a minute of it is saved here.
    if module_path.name in ("test_tier.py", "test_lmcache_adapter.py"):
        with warnings.catch_warnings():
            # Importing vLLM on a machine without a GPU warns of much that is not ours.
            warnings.simplefilter("ignore")
            importlib.import_module("hicache_storage.engines.vllm.tier")
            importlib.import_module("hicache_storage.engines.lmcache.adapter")
            importlib.import_module("lmcache.v1.distributed.config")
            importlib.import_module("lmcache.v1.distributed.storage_controllers")
            importlib.import_module("lmcache.v1.multiprocess.config")
            importlib.import_module("hicache_conformance.interfaces.lmcache_l2.storage")
            importlib.import_module("hicache_conformance.interfaces.vllm_tier.storage")


@pytest.fixture
def trouble():
    """The drivers of `tests/interop/drivers.py` under their names, and what goes wrong in them."""
    from tests.interop.drivers import installed

    with installed() as trouble:
        yield trouble
