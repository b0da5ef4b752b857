"""The suite against the samples, in one pytest.

Run by `test_mutants.py` and `soak.py`, which read the reports.

The environment variable `HICACHE_SAMPLES` chooses: `all` samples, each with all cases of its
classes; `mutants`, each with the cases of the rules that it breaks; `right` ones; or `own`, the
project's own drivers.
"""

from __future__ import annotations

import importlib
import os

from drivers_plugin import SAMPLES
from sample_driver import SampleDriver

from hicache_conformance import DriverConformance
from hicache_conformance.fixtures.target import DriverTarget
from hicache_conformance.model.pytest_keys import CASE_MARK

_CASES = {base.__name__: base for base in DriverConformance.__bases__}
_OWN = ("file", "memory")


def _chosen() -> dict[str, SampleDriver]:
    match os.environ.get("HICACHE_SAMPLES", "all"):
        case "all":
            return SAMPLES
        case "mutants":
            return {name: sample for name, sample in SAMPLES.items() if sample.breaks}
        case "right":
            return {name: sample for name, sample in SAMPLES.items() if not sample.breaks}
        case "own":
            return {name: SampleDriver() for name in _OWN}
        case other:
            raise ValueError(f"HICACHE_SAMPLES={other!r}; choose all, mutants, right or own")


def _without(bases: tuple[type, ...], rules: tuple[str, ...]) -> dict[str, None]:
    """Names of the cases that are about other rules, for a class that hides them from pytest."""
    found = dict[str, None]()
    for base in bases:
        for home in base.__mro__:
            for name, function in vars(home).items():
                marks = [
                    mark for mark in getattr(function, "pytestmark", ()) if mark.name == CASE_MARK
                ]
                if marks and not set(marks[0].kwargs["rules"]) & set(rules):
                    found[name] = None
    return found


def _engine(sample: SampleDriver) -> dict[str, object]:
    """The transfer engine of a sample that brings one, as an attribute of its class."""
    if not sample.transfer_engine:
        return {}
    module, _, name = sample.transfer_engine.partition(":")
    return {"transfer_engine": staticmethod(getattr(importlib.import_module(module), name))}


_only_meant = os.environ.get("HICACHE_SAMPLES") == "mutants"
for _name, _sample in _chosen().items():
    _bases = tuple(_CASES[f"{where}Cases"] for where in _sample.case_classes)
    _bases = (*_bases, DriverTarget) if _bases else (DriverConformance,)
    # Cases that are named may find a fault that they are not about.
    _hidden = _without(_bases, _sample.breaks) if _only_meant and not _sample.cases else {}
    globals()[f"Test{_name}"] = type(
        f"Test{_name}",
        _bases,
        {**_hidden, **_engine(_sample), "driver": _name, "__module__": __name__},
    )
