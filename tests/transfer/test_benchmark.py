"""The benchmark of device copies runs, on the simulator, and says that its figures mean nothing."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hicache_storage.transfer import StreamSimulator
from tests.support.commands import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = BENCHMARKS / "device_copies.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("device_copies")


def run(*arguments):
    return run_program(sys.executable, BENCHMARK, *arguments)


def test_it_runs_on_the_simulator(tmp_path):
    size = [
        "--layers",
        "2",
        "--pages",
        "16",
        "--mib",
        "1",
        "--rounds",
        "1",
        "--orders",
        "scattered",
    ]
    done = run(
        "--device", "cpu", "--layouts", "page_first,layer_first", "--out", str(tmp_path), *size
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("**No GPU")
    assert text in done.stdout
    measured = json.loads((tmp_path / "results.json").read_text())["measured"]
    copies = [entry for entry in measured if entry["operation"] != "overlap"]
    assert [(entry["subject"], entry["operation"]) for entry in copies] == [
        (f"{layout}/scattered/16", direction)
        for layout in ("page_first", "layer_first")
        for direction in ("write-back", "load")
    ]
    assert all(
        set(entry["seconds"]) == {"one pinned copy", "direct", "kernel", "mapped"}
        for entry in copies
    )
    overlaps = [entry for entry in measured if entry["operation"] == "overlap"]
    assert all(set(entry["seconds"]) == {"load", "compute", "both"} for entry in overlaps)
    assert len(overlaps) == 6


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--pages", "3"], "no whole number of tokens"), (["--mib", "0"], "--mib")],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    done = run("--device", "cpu", "--out", str(tmp_path), *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_scattered_pages_lie_beside_no_other(benchmark):
    """On either side: host memory of a cache that has run for a while is in pieces, too."""
    for order, distances in (("adjacent", {4}), ("scattered", {8})):
        first = benchmark.slots(64, 4, order)[::4].tolist()
        assert {after - before for before, after in pairwise(sorted(first))} == distances
    assert first != sorted(first)


@pytest.mark.long
def test_engines_share_few_streams(benchmark, monkeypatch, tmp_path):
    """torch has 32; one that is the compute stream as well would make an overlap of two."""
    made, stream = [], StreamSimulator.stream
    monkeypatch.setattr(
        StreamSimulator,
        "stream",
        lambda simulator, name: made.append(name) or stream(simulator, name),
    )
    size = [
        "--layers",
        "1",
        "--pages",
        "4",
        "--mib",
        "1",
        "--rounds",
        "1",
        "--layouts",
        "page_first,layer_first",
    ]
    monkeypatch.setattr(
        sys, "argv", ["device_copies.py", "--device", "cpu", "--out", str(tmp_path), *size]
    )
    benchmark.main()
    assert sorted(made) == ["compute", "gather", "load", "pinned", "stage", "write-back"]


def test_the_cost_of_enqueueing_is_measured_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cost = importlib.import_module("enqueue_cost")
    monkeypatch.setattr(
        sys, "argv", ["enqueue_cost.py", "--pages", "16", "--rounds", "1", "--out", str(tmp_path)]
    )
    threads = cost.torch.get_num_threads()
    try:
        cost.main()
    finally:
        cost.torch.set_num_threads(threads)
    measured = json.loads((tmp_path / "results.json").read_text())["measured"]
    assert {entry["backend"] for entry in measured} == {
        "direct",
        "kernel",
        "mapped",
        "mapped without Triton",
    }
    assert all(entry["seconds"] > 0 for entry in measured)
    assert "a page" in capsys.readouterr().out
