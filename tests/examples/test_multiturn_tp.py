"""The multi-turn example of two TP sizes: its hit rates are exact."""

from __future__ import annotations

import importlib
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

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
    for shards, expected in ((example.HEADS, with_shards), (0, without)):
        result = getattr(example, run)(example.Workload(**SMALL), shards)
        assert result.rounds == [float(rate) for rate in rates(expected)]


def test_the_command_prints_rates(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "Workload", partial(example.Workload, **SMALL))
    example.main()
    overall = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if "  all" in line]
    assert [float(shards) > float(without) for shards, without in overall] == [True, True]
