"""The multi-turn example of two TP sizes: its hit rates are exact."""

from __future__ import annotations

import importlib
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.commands import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"clients": 2, "rounds": 4, "request": 32, "output": 32}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("multiturn_tp")


def rates(restored):
    """Of restored pages, by round; a prompt has 2 pages in the first, and 4 more in each other."""
    return [Fraction(pages, 4 * number + 2) for number, pages in enumerate(restored)]


@pytest.mark.parametrize(
    ("run", "with_shards", "without"),
    [
        # All but the page that waits for the last token's KV; the prompt before the last answer.
        ("disaggregated", [0, 3, 7, 11], [0, 2, 6, 10]),
        ("restarted", [0, 3, 7, 11], [0, 3, 0, 11]),
    ],
)
def test_hit_rates(example, run, with_shards, without):
    workload = example.Workload(**SMALL)
    for shards, expected in ((example.HEADS, with_shards), (0, without)):
        result = getattr(example, run)(workload, shards)
        assert result.rounds == [float(rate) for rate in rates(expected)]


@pytest.mark.long
def test_the_command_writes_rates(tmp_path):
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    rates_file = tmp_path / "rates.json"
    program = [sys.executable, str(EXAMPLES / "multiturn_tp.py"), *options]
    run_program(*program, "--json", str(rates_file))
    told = json.loads(rates_file.read_text())
    assert told["workload"] == {**SMALL, "seed": 1}
    for title in ("prefill at TP 2, decode at TP 4", "TP 4, started again at TP 2"):
        assert told[title]["shards"]["overall"] > told[title]["without"]["overall"]
