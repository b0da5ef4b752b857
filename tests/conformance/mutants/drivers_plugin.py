"""Registers the samples that the modules `mutants_*.py` list in their `SAMPLES`."""

from __future__ import annotations

import importlib
from pathlib import Path

from sample_driver import PATH, SampleDriver, in_module

from hicache_storage.hookspecs import DriverSpec, hookimpl

_HOME = Path(__file__).parent

SAMPLES: dict[str, SampleDriver] = {}
"""By name."""
_FAILING = in_module(
    "drivers_failing",
    {
        **{
            name: SampleDriver()
            for name in (
                *("AbortsInLargeReads", "Dies", "Hangs", "HangsWithTheLock"),
                *("CannotOpen", "TakesLess"),
            )
        },
        "Poisoned": SampleDriver(config="drivers_plain:FileControlConfig", trial_config=PATH),
    },
)
"""Registered beside them, for the tests of the command line."""
for _module in sorted(_HOME.glob("mutants_*.py")):
    _more = importlib.import_module(_module.stem).SAMPLES
    assert SAMPLES.keys().isdisjoint(_more), (
        f"{_module.name} gives a name again: {SAMPLES.keys() & _more.keys()}"
    )
    SAMPLES.update(_more)


@hookimpl
def hicache_register_drivers() -> list[DriverSpec]:
    """Register every sample driver under its name."""
    return [_spec(name, sample) for name, sample in {**SAMPLES, **_FAILING}.items()]


def _spec(name: str, sample: SampleDriver) -> DriverSpec:
    return DriverSpec(
        name=name,
        target=sample.target,
        config=sample.config,
        capabilities=sample.capabilities,
        trial_config=sample.trial_config,
        capacity_option=sample.capacity_option,
        trial_services=sample.trial_services,
        trial_members=sample.trial_members,
    )
