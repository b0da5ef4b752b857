"""The examples and the README's code run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program, run_python

pytestmark = pytest.mark.merge

ROOT = Path(__file__).parents[2]


def test_the_demo_restores_what_a_killed_writer_acknowledged(tmp_path):
    demo = ROOT / "examples" / "demo.py"
    done = run_program(sys.executable, demo, "--gib", "0.5", "--path", tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL while it stored the second conversation" in done.stdout
    assert "every acknowledged page came back, every byte verified" in done.stdout


def test_the_code_in_the_readme_prints_what_it_says(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    expected = [
        line.split("#", 1)[1].strip()
        for line in block.splitlines()
        if line.strip().startswith("print(")
    ]
    program = block.replace("kv-pages", str(tmp_path / "kv-pages"))
    done = run_python(program)
    assert done.stdout.splitlines() == expected
