"""Conformance suite of the HiCacheStorage v2 contract.

Driver authors inherit `DriverConformance`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_conformance.suite.driver_conformance import DriverConformance as DriverConformance

__all__ = ["DriverConformance"]


def __getattr__(name: str) -> object:
    # pytest imports this package in every run of an environment that has it installed; the cases
    # wait until asked for.
    if name == "DriverConformance":
        from hicache_conformance.suite.driver_conformance import DriverConformance

        return DriverConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
