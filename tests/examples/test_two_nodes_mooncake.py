"""The two-node run of the Mooncake driver, in namespaces where this user may make some and on
loopback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program

pytestmark = pytest.mark.merge

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_nodes_mooncake.py"


@pytest.mark.parametrize(
    "options",
    [pytest.param([], marks=pytest.mark.long), ["--loopback"]],
    ids=["where it can", "loopback"],
)
def test_what_one_node_stores_the_other_reads(options):
    done = run_program(sys.executable, EXAMPLE, "--pages", "16", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("16 of 16 pages") == 4
    assert "every page that one node stored was read by the other, byte for byte" in done.stdout
