"""Registers the controls that the modules `mutants_*.py` list in their `CONTROLS`."""

from __future__ import annotations

import importlib
from pathlib import Path

from control import Control

from hicache_storage.hookspecs import DriverSpec, hookimpl

_HOME = Path(__file__).parent

CONTROLS: dict[str, Control] = {}
"""By name. The drivers of the command-line tests (`Dies`, `Hangs`, `CannotOpen`) are registered beside them."""
for _module in sorted(_HOME.glob("mutants_*.py")):
    _more = importlib.import_module(_module.stem).CONTROLS
    assert CONTROLS.keys().isdisjoint(_more), f"{_module.name} gives a name again: {CONTROLS.keys() & _more.keys()}"
    CONTROLS.update(_more)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    """Offer every control under its name."""
    return [_spec(name, CONTROLS.get(name, Control())) for name in (*CONTROLS, "Dies", "Hangs", "CannotOpen")]


def _spec(name: str, control: Control) -> DriverSpec:
    return DriverSpec(
        name=name,
        target=control.target or f"control_drivers:{name}",
        config=control.config,
        capabilities=control.capabilities,
        trial_config=control.trial_config,
        capacity_option=control.capacity_option,
        trial_services=control.trial_services,
    )
