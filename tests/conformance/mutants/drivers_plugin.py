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
                name=name,
                target=f"mutant:{name}",
                capabilities=getattr(sample.driver, "registered", sample.driver.promises),
                **sample.driver.spec,
            )
            for name, sample in SAMPLES.items()
        ),
    ]
