"""The suite against every control, in one pytest; run by `test_controls.py`, which reads the reports."""

from __future__ import annotations

import os

from control_plugin import CONTROLS
from hicache_conformance import DriverConformance

_wanted = os.environ.get("HICACHE_CONTROLS", "").split(",")
for _name in CONTROLS:
    if not os.environ.get("HICACHE_CONTROLS") or _name in _wanted:
        globals()[f"Test{_name}"] = type(f"Test{_name}", (DriverConformance,), {"driver": _name, "__module__": __name__})
