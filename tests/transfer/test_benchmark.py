"""The benchmarks of device copies run without a GPU, and say that their figures mean nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from hicache_storage.tools.bench.results import Report
from tests.support.commands import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = BENCHMARKS / "device_copies.py"


def run(*arguments):
    return run_program(sys.executable, BENCHMARK, "--device", "cpu", *arguments)


def test_other_sides_do_not_end_the_run(tmp_path):
    """A tree without SGLang's kernels is said to be left out."""
    size = ["--cases", "2", "--layers", "2", "--mib", "1", "--rounds", "1"]
    done = run("--out", str(tmp_path), "--sglang", str(tmp_path), *size)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("**No GPU")
    assert text in done.stdout
    assert "SGLang's kernels are left out: ModuleNotFoundError" in text
    found = Report.read(tmp_path / "results.json").measurements
    assert {one.label for one in found} == {"one pinned copy", "chosen", "dma"}
    assert {one.operation.split(",")[0] for one in found} == {"write-back", "load"}
    assert all(len(one.rounds) == 1 for one in found)


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("enqueue_cost")


def test_the_cost_of_enqueueing_is_measured_without_a_gpu(cost, monkeypatch, tmp_path, capsys):
    arguments = ["enqueue_cost.py", "--pages", "16", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    threads = cost.torch.get_num_threads()
    try:
        cost.main()
    finally:
        cost.torch.set_num_threads(threads)
    assert Report.read(tmp_path / "results.json").figures == {
        "calls: page_first, 1, chosen, 16, write-back": [2],
        "calls: page_first, 1, chosen, 16, load": [33],
        "calls: page_first, 64, chosen, 16, write-back": [3],
        "calls: page_first, 64, chosen, 16, load": [33],
        "calls: page_first_direct, 64, dma, 16, write-back": [3],
        "calls: page_first_direct, 64, dma, 16, load": [13],
    }
    assert "least" in capsys.readouterr().out
