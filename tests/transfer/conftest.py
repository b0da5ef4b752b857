"""Fixtures of the copies: the places where they run."""

from __future__ import annotations

import pytest

from tests.transfer.rig import PLACES, Simulated


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
