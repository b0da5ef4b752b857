"""Fixtures of the copies: the places where they run, and pairs of pools."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from transfer_bench import PLACES, Bench, Simulated


@pytest.fixture(params=PLACES)
def place(request):
    made = request.param(request.node.name)
    yield made
    made.close()


@pytest.fixture
def simulated(request):
    made = Simulated(request.node.name)
    yield made
    made.close()


@pytest.fixture
def bench(place):
    """Makes benches in one place, each given kind, layout and way."""

    def make(kind, layout, way, **options):
        return Bench(place, kind, layout, way, **options)

    return make
