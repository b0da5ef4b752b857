"""The interface of fault injectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hicache_conformance.model.fault_plan import FaultPlan
    from hicache_storage.spec import HiCacheStorage


class FaultInjector(ABC):
    """A place below a driver where operations can be made to fail.

    One plan at a time; healed before the next.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.plans: list[FaultPlan] = []
        """Plans that were injected, each once, in their order; for the report of the case."""

    @property
    def tmp(self) -> Path | None:
        """The directory that `{tmp}` stands for with this injector.

        None where it does not matter.
        """
        return None

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports that `{port:NAME}` stands for with this injector.

        Those of the servers themselves if empty.
        """
        return {}

    def renew(self) -> None:
        """Let `tmp` be an empty directory, behind a case that has failed."""
        return

    def attach(self, storage: HiCacheStorage) -> None:
        """Put the injector below a storage that was just constructed."""
        return

    def inject(self, plan: FaultPlan) -> None:
        """Activate a plan, and record it for the report."""
        if plan.faults and plan not in self.plans:
            self.plans.append(plan)
        self.apply(plan)

    @abstractmethod
    def apply(self, plan: FaultPlan) -> None:
        """Activate a plan."""

    @abstractmethod
    def heal(self) -> None:
        """End all faults, and release what hangs. Idempotent."""

    @abstractmethod
    def requests(self) -> int:
        """Count the requests that have reached the injector so far."""

    def hold_replies(self, quiet_seconds: float) -> None:  # noqa: B027 - of one injector alone
        """Hold replies back until nothing was sent for this time, so that waits can be counted.

        Only the injector `network` does; it ends with `waits()`.
        """

    def waits(self) -> int:
        """Let replies through again, and count how often the driver has waited for some."""
        return 0

    @abstractmethod
    def injected_count(self) -> int:
        """Count the requests of the present or last plan that a fault has hit."""

    def close(self) -> None:
        """Heal, and leave nothing behind."""
        self.heal()
