"""The code in the guide to device copies runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from test_stream_rules import MUTANTS, STAGING_MUTANTS

GUIDE = Path(__file__).parents[2] / "docs" / "device-copies.md"
CHECKS = """
assert written.done() and counter.done()
assert [pool.available_size() for pool in slots.values()] == [1024, 16]
if place == "cpu":
    device.close()
    assert not device.races, device.races[0]
"""


def test_the_code_of_the_guide_runs():
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code + CHECKS], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def test_the_guide_lists_the_mutant_of_every_event():
    rows = re.findall(r"^\|.*\| ST-[123] \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    listed = [mutant for row in rows for mutant in row.split(", ")]
    assert sorted(listed) == sorted({**MUTANTS, **STAGING_MUTANTS})
