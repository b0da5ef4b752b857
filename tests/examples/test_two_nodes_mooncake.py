"""The two-node run of the Mooncake driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program

pytestmark = pytest.mark.merge

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_nodes_mooncake.py"


def test_what_one_node_stores_the_other_reads():
    done = run_program(sys.executable, EXAMPLE, "--pages", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("16 of 16 pages") == 4
    assert "every page that one node stored was read by the other, byte for byte" in done.stdout
