"""Registers the samples of the tables `mutants_*.py`."""

from __future__ import annotations

import importlib
from pathlib import Path

from drivers_failing import FAILING
from mutant import SAMPLES

from hicache_storage.hookspecs import DriverSpec, hookimpl

for _table in sorted(Path(__file__).parent.glob("mutants_*.py")):
    importlib.import_module(_table.stem)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    """Register every sample under its name."""
    return [
        *FAILING,
        *(
            DriverSpec(
                name=sample.name,
                target=f"mutant:{sample.name}",
                config=sample.base.config,
                capabilities=sample.capabilities,
                trial_config=sample.base.trial_config,
                capacity_option=sample.base.capacity_option,
                trial_services=sample.base.trial_services,
                trial_members=sample.base.trial_members,
            )
            for sample in SAMPLES.values()
        ),
    ]
