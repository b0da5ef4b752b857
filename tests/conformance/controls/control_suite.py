"""The suite against every control, in one pytest; run by `test_controls.py`, which reads the reports."""

from __future__ import annotations

from control_plugin import CONTROLS

from hicache_conformance import DriverConformance
from hicache_conformance.target import DriverTarget

_CASES = {base.__name__: base for base in DriverConformance.__bases__}

for _name, _control in CONTROLS.items():
    _bases = tuple(_CASES[f"{where}Cases"] for where in _control.where)
    globals()[f"Test{_name}"] = type(
        f"Test{_name}", (*_bases, DriverTarget) if _bases else (DriverConformance,), {"driver": _name, "__module__": __name__}
    )
