"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import run_python

pytestmark = pytest.mark.merge

ROOT = Path(__file__).parents[2]


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
