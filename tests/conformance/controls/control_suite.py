"""The suite against the controls, in one pytest; run by `test_controls.py` and `soak.py`, which read the reports.

The environment variable `HICACHE_CONTROLS` chooses: `all` controls, each with all cases of its classes; `mutants`, each with
the cases of the rules that it breaks; `right` ones; or `own`, the project's own drivers.
"""

from __future__ import annotations

import importlib
import os

from control import Control
from control_plugin import CONTROLS

from hicache_conformance import DriverConformance
from hicache_conformance.fixtures.target import DriverTarget
from hicache_conformance.model.case import MARK

_CASES = {base.__name__: base for base in DriverConformance.__bases__}
_OWN = ("file", "memory")


def _chosen() -> dict[str, Control]:
    match os.environ.get("HICACHE_CONTROLS", "all"):
        case "all":
            return CONTROLS
        case "mutants":
            return {name: control for name, control in CONTROLS.items() if control.breaks}
        case "right":
            return {name: control for name, control in CONTROLS.items() if not control.breaks}
        case "own":
            return {name: Control() for name in _OWN}
        case other:
            raise ValueError(f"HICACHE_CONTROLS={other!r}; choose all, mutants, right or own")


def _without(bases: tuple[type, ...], rules: tuple[str, ...]) -> dict[str, None]:
    """Names of the cases that are about other rules, for a class that hides them from pytest."""
    found = dict[str, None]()
    for base in bases:
        for home in base.__mro__:
            for name, function in vars(home).items():
                marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == MARK]
                if marks and not set(marks[0].kwargs["rules"]) & set(rules):
                    found[name] = None
    return found


def _engine(control: Control) -> dict[str, object]:
    """The transfer engine of a control that brings one, as an attribute of its class."""
    if not control.transfer_engine:
        return {}
    module, _, name = control.transfer_engine.partition(":")
    return {"transfer_engine": staticmethod(getattr(importlib.import_module(module), name))}


_only_meant = os.environ.get("HICACHE_CONTROLS") == "mutants"
for _name, _control in _chosen().items():
    _bases = tuple(_CASES[f"{where}Cases"] for where in _control.where)
    _bases = (*_bases, DriverTarget) if _bases else (DriverConformance,)
    # Cases that are named may find a fault that they are not about.
    _hidden = _without(_bases, _control.breaks) if _only_meant and not _control.cases else {}
    globals()[f"Test{_name}"] = type(
        f"Test{_name}", _bases, {**_hidden, **_engine(_control), "driver": _name, "__module__": __name__}
    )
