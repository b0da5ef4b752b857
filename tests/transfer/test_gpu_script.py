"""The script for a GPU machine: it runs dry without one, names what is missing, and takes wheels."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

from tests.support.commands import run_program

ROOT = Path(__file__).parents[2]
WITHOUT_MSGSPEC = """
import sys
from importlib.machinery import PathFinder


class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "msgspec":
            path = [entry for entry in sys.path if "hicache-wheels" in entry]
        return PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without()
"""


def run(tmp_path, **environment):
    """The script in this Python, in which msgspec seems not to be installed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MSGSPEC)
    variables = {"PYTHONPATH": str(tmp_path), "PARTS": "stack", "CUDA_VISIBLE_DEVICES": ""}
    variables["OUT"] = str(tmp_path / "out")
    return run_program(
        ROOT / "scripts" / "gpu_tests.sh", sys.executable, **{**variables, **environment}
    )


def test_what_is_missing_is_named_and_how_it_comes_there(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (
        f"has no msgspec; install them, or bring wheels: scripts/gpu_tests.sh --fetch DIRECTORY "
        f"{version}" in done.stderr
    )


def test_wheels_that_are_brought_are_used(tmp_path):
    """A wheel that says that it is msgspec; with it the next thing that is missing is a GPU."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "msgspec-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("msgspec/__init__.py", "")
        wheel.writestr(
            "msgspec-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: msgspec\nVersion: 1.0\n"
        )
        wheel.writestr(
            "msgspec-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("msgspec-1.0.dist-info/RECORD", "")
    done = run(tmp_path, WHEELS=str(wheels))
    assert done.returncode == 1
    assert "finds no CUDA device" in done.stderr
    assert "has no" not in done.stderr


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
