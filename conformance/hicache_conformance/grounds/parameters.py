"""One case becomes one for each ground that its driver has, and for each trouble of that ground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.faults.troubles import TROUBLES
from hicache_conformance.grounds.standing import NO_GROUND, commands_of, ground_names, standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from hicache_conformance.grounds.ground import Ground
    from hicache_conformance.target import DriverTarget

GROUND, TROUBLE = "ground", "trouble"
"""Names of the arguments by which a case asks for a ground, and for a trouble of it."""
PLANS_PROPERTY: Final = "hicache_plans"
"""User property of a report: the plans of faults that the case put below the driver, as JSON."""


def parametrize(owner: type[DriverTarget], metafunc: pytest.Metafunc) -> None:
    """Give a case that asks for a ground all those of the driver, so that reports name each."""
    if GROUND not in metafunc.fixturenames:
        return
    grounds = ground_names(owner.driver, owner.config, owner.services) or [NO_GROUND]
    if TROUBLE not in metafunc.fixturenames:
        metafunc.parametrize(GROUND, grounds, indirect=True)
        return
    pairs = [(ground, trouble) for ground in grounds for trouble in TROUBLES.get(ground, {NO_GROUND: ()})]
    ids = [f"{ground}-{trouble}" if ground != trouble else ground for ground, trouble in pairs]
    metafunc.parametrize((GROUND, TROUBLE), pairs, indirect=[GROUND], ids=ids)


def open_ground(owner: DriverTarget, request: pytest.FixtureRequest) -> Iterator[Ground]:
    """The ground that a case was parametrized with; healed before the case and after it."""
    cls = type(owner)
    stands = standing(request.config, f"{cls.__module__}.{cls.__qualname__}", commands_of(cls.driver, cls.config, cls.services))
    ground = stands.ground(request.param)
    ground.heal()
    ground.plans.clear()
    yield ground
    request.node.user_properties.append((PLANS_PROPERTY, msgspec.json.encode(ground.plans).decode()))
    ground.heal()


def ground_in_use(request: pytest.FixtureRequest) -> Ground | None:
    """The ground of the running case, if it asks for one."""
    if GROUND not in request.fixturenames:
        return None
    ground: Ground = request.getfixturevalue(GROUND)
    return ground
