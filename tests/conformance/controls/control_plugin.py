"""Registers the controls that the modules `mutants_*.py` list in their `CONTROLS`."""

from __future__ import annotations

import importlib
from pathlib import Path

from control import Control, in_module

from hicache_storage.hookspecs import DriverSpec, hookimpl

_HOME = Path(__file__).parent

CONTROLS: dict[str, Control] = {}
"""By name."""
_FAILING = in_module("control_failing", {name: Control() for name in ("Dies", "Hangs", "CannotOpen")})
"""Registered beside them, for the tests of the command line."""
for _module in sorted(_HOME.glob("mutants_*.py")):
    _more = importlib.import_module(_module.stem).CONTROLS
    assert CONTROLS.keys().isdisjoint(_more), f"{_module.name} gives a name again: {CONTROLS.keys() & _more.keys()}"
    CONTROLS.update(_more)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    """Offer every control under its name."""
    return [_spec(name, control) for name, control in {**CONTROLS, **_FAILING}.items()]


def _spec(name: str, control: Control) -> DriverSpec:
    return DriverSpec(
        name=name,
        target=control.target,
        config=control.config,
        capabilities=control.capabilities,
        trial_config=control.trial_config,
        capacity_option=control.capacity_option,
        trial_services=control.trial_services,
    )
