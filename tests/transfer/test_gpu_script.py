"""The script for a GPU machine runs dry without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.commands import run_program

ROOT = Path(__file__).parents[2]


def test_it_runs_dry_without_a_gpu(tmp_path):
    """All parts: the tests are found by the marks and entry points of a bare checkout, and skipped;
    the benchmark is run on the simulator. So the one command for a GPU does not rot."""
    done = run_program(
        ROOT / "scripts" / "gpu_tests.sh",
        sys.executable,
        DRY_RUN="1",
        OUT=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "tests.json").read_text())
    assert {part: entry["passed"] for part, entry in found.items()} == {
        "copies": 0,
        "stack": 0,
        "example": 0,
    }
    assert found["copies"]["skipped"] > 300
    assert found["stack"]["skipped"] == 3
    assert found["example"]["skipped"] == 5
    assert not any(entry["failed"] for entry in found.values())
    assert "| copies | 0 | 0 |" in (tmp_path / "tests.md").read_text()
    assert (tmp_path / "results.md").read_text().startswith("**No GPU")
    assert json.loads((tmp_path / "results.json").read_text())["measurements"]
