"""Imports of copies: a GPU machine may have torch, and little else."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import run_python

GPU_TESTS = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("msgspec", "xxhash", "hypothesis", "starlette", "aiohttp", "pytest_timeout", "xdist"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
import pytest

files = ["transfer/test_cuda.py", "transfer/test_stream_rules.py", "transfer/test_engine.py"]
files += ["pools/test_memory.py", "pools/test_adapter.py"]
options = ["-c", "tests/gpu.ini", "--rootdir", ".", "-p", "no:cacheprovider", "-m", "gpu", "--confcutdir", "tests/transfer"]
ended = pytest.main([*options, "--collect-only", "-q", "-W", "default", *(f"tests/{file}" for file in files)])
sys.exit(ended)
"""
ROOT = Path(__file__).parents[2]


def test_tests_of_copies_on_a_gpu_need_little_more():
    """`scripts/gpu_tests.sh` finds them where there is no plugin of pytest, and nothing of ours is
    installed."""
    found = run_python(GPU_TESTS, cwd=ROOT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1").stdout
    assert "tests/transfer/test_cuda.py::test_no_call_waits_for_a_copy" in found
    assert "test_a_missing_event_is_found[cuda" in found
    assert "tests/pools/test_memory.py::test_cuda_sees_locked_memory" in found
