"""The guide to device copies lists the mutant of every event; `make docs` runs its code."""

from __future__ import annotations

import re
from pathlib import Path

from test_stream_rules import MUTANTS, STAGING_MUTANTS

GUIDE = Path(__file__).parents[2] / "docs" / "device-copies.md"


def test_the_guide_lists_the_mutant_of_every_event():
    rows = re.findall(r"^\|.*\| ST-[123] \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    listed = [mutant for row in rows for mutant in row.split(", ")]
    assert sorted(listed) == sorted({**MUTANTS, **STAGING_MUTANTS})
