"""What runs on a GPU machine runs without one, so that it does not rot: the script, the benchmarks,
and the imports of the tests, of which such a machine may have little."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program, run_python

ROOT = Path(__file__).parents[2]
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


def test_tests_of_copies_on_a_gpu_need_little_more():
    """`scripts/gpu_tests.sh` finds them where there is no plugin of pytest, and nothing of ours is
    installed."""
    found = run_python(GPU_TESTS, cwd=ROOT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1").stdout
    assert "tests/transfer/test_cuda.py::test_no_call_waits_for_a_copy" in found
    assert "test_a_missing_event_is_found[cuda" in found
    assert "tests/pools/test_memory.py::test_cuda_sees_locked_memory" in found


@pytest.mark.merge
def test_the_script_runs_dry(tmp_path):
    """All parts: the tests are found by the marks and entry points of a bare checkout, and skipped;
    the benchmark is run on the simulator."""
    script = ROOT / "scripts" / "gpu_tests.sh"
    dry = {"DRY_RUN": "1", "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(script, sys.executable, **dry)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "tests.json").read_text())
    assert [found[part]["passed"] for part in ("copies", "stack", "example")] == [0, 0, 0]
    assert found["copies"]["skipped"] > 300
    assert (found["stack"]["skipped"], found["example"]["skipped"]) == (3, 5)
    assert not any(entry["failed"] for entry in found.values())
    assert "| copies | 0 | 0 |" in (tmp_path / "tests.md").read_text()
    assert (tmp_path / "results.md").read_text().startswith("**No GPU")
    assert json.loads((tmp_path / "results.json").read_text())["measurements"]


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("enqueue_cost")


def test_the_cost_of_enqueueing_is_measured_without_a_gpu(cost, monkeypatch, tmp_path, capsys):
    arguments = ["enqueue_cost.py", "--pages", "16", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    threads = cost.torch.get_num_threads()
    try:
        cost.main()
    finally:
        cost.torch.set_num_threads(threads)
    assert json.loads((tmp_path / "results.json").read_text())["figures"] == {
        "calls: page_first, 1, 16, write-back": [2],
        "calls: page_first, 1, 16, load": [33],
        "calls: page_first, 64, 16, write-back": [3],
        "calls: page_first, 64, 16, load": [33],
        "calls: page_first_direct, 64, 16, write-back": [3],
        "calls: page_first_direct, 64, 16, load": [17],
    }
    assert "least" in capsys.readouterr().out
