"""What tests of the cache share."""

from __future__ import annotations

import pytest

from hicache_storage.hybrid.policies import WritePolicy
from tests.hybrid.radix.controller import WorldController
from tests.hybrid.radix.serving import GRID, PAGE
from tests.hybrid.radix.world import SIZES, World


@pytest.fixture
def make_world():
    made = []

    def make(*, grid=GRID, policy=WritePolicy.WRITE_THROUGH, **sizes):
        controller = WorldController.of(SIZES | sizes, PAGE, states=grid is not None)
        made.append(World(controller, PAGE, grid, policy))
        return made[-1]

    yield make
    for world in made:
        world.check()
        world.controller.close()


@pytest.fixture
def world(make_world):
    return make_world()
