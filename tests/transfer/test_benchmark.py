"""The benchmark of device copies runs, on the simulator, and says that its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "device_copies.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, timeout=250, check=False)


def test_it_runs_on_the_simulator(tmp_path):
    size = ["--layers", "2", "--pages", "16", "--mib", "1", "--rounds", "1", "--orders", "scattered"]
    done = run("--device", "cpu", "--layouts", "page_first,layer_first", "--out", str(tmp_path), *size)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("**No GPU")
    assert text in done.stdout
    measured = json.loads((tmp_path / "results.json").read_text())["measured"]
    copies = [entry for entry in measured if entry["operation"] != "overlap"]
    assert [(entry["subject"], entry["operation"]) for entry in copies] == [
        (f"{layout}/scattered/16", direction) for layout in ("page_first", "layer_first") for direction in ("write-back", "load")
    ]
    assert all(set(entry["seconds"]) == {"one pinned copy", "direct", "kernel", "mapped"} for entry in copies)
    overlaps = [entry for entry in measured if entry["operation"] == "overlap"]
    assert all(set(entry["seconds"]) == {"load", "compute", "both"} for entry in overlaps)
    assert len(overlaps) == 6


@pytest.mark.parametrize(("arguments", "message"), [(["--pages", "3"], "no whole number of tokens"), (["--mib", "0"], "--mib")])
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    done = run("--device", "cpu", "--out", str(tmp_path), *arguments)
    assert done.returncode != 0
    assert message in done.stderr
