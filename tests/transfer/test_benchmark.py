"""The benchmarks of device copies run without a GPU, and say that their figures mean nothing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = BENCHMARKS / "device_copies.py"


def run(*arguments):
    return run_program(sys.executable, BENCHMARK, "--device", "cpu", *arguments)


def test_wrong_arguments_are_refused(tmp_path):
    done = run("--out", str(tmp_path), "--mib", "0")
    assert done.returncode != 0
    assert "--mib, --rounds and --cases must be at least 1" in done.stderr


def test_other_sides_do_not_end_the_run(tmp_path):
    """A tree without SGLang's kernels is said to be left out."""
    size = ["--cases", "2", "--layers", "2", "--mib", "1", "--rounds", "1"]
    done = run("--out", str(tmp_path), "--sglang", str(tmp_path), *size)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("**No GPU")
    assert text in done.stdout
    assert "SGLang's kernels are left out: ModuleNotFoundError" in text
    found = json.loads((tmp_path / "results.json").read_text())["measured"]
    assert {entry["side"] for entry in found} == {"one pinned copy", "chosen", "dma"}
    assert {entry["direction"] for entry in found} == {"write-back", "load"}
    assert all(len(entry["seconds"]) == 1 for entry in found)


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
    found = json.loads((tmp_path / "results.json").read_text())["measured"]
    assert [(entry["layout"], entry["direction"], entry["calls"]) for entry in found] == [
        ("page_first", "write-back", 2),
        ("page_first", "load", 33),
        ("page_first", "write-back", 3),
        ("page_first", "load", 33),
        ("page_first_direct", "write-back", 3),
        ("page_first_direct", "load", 13),
    ]
    assert "least" in capsys.readouterr().out
