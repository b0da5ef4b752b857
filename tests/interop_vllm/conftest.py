"""Tests against a real vLLM. Without one they fail, they are not skipped; deselect them with `-m
"not vllm"`."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest

MISSING = """vLLM is not installed here, and these tests are about nothing else.
Build an environment that has it and run them there:

    scripts/make_vllm_env.sh .venv-vllm
    .venv-vllm/bin/python -m pytest -m vllm tests/interop_vllm

or leave them out with -m "not vllm"."""


class NeedsVllm(pytest.Module):
    """Stands for a test module that cannot be imported without vLLM: one test, which fails."""

    def collect(self):
        yield Missing.from_parent(self, name="needs_vllm")


class Missing(pytest.Item):
    def __init__(self, **options):
        super().__init__(**options)
        self.add_marker(pytest.mark.vllm)

    def runtest(self):
        pytest.fail(MISSING, pytrace=False)

    def reportinfo(self):
        return self.path, None, self.nodeid


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("vllm") is None:
        return NeedsVllm.from_parent(parent, path=module_path)
    if "server" not in module_path.name:
        with warnings.catch_warnings():
            # Importing vLLM on a machine without a GPU warns of much that is not ours.
            warnings.simplefilter("ignore")
            importlib.import_module("hicache_storage.engines.vllm.tier")
            importlib.import_module("hicache_storage.engines.lmcache.adapter")
    return None
