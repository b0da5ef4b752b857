"""`DriverConformance`: the whole suite as one class to inherit; and the registry of its cases."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hicache_conformance.cases.budget import BudgetCases, StatsCases
from hicache_conformance.cases.capacity import EvictionCases, EvictionProcessCases, SpaceCases
from hicache_conformance.cases.concurrency import ConcurrencyCases
from hicache_conformance.cases.corruption import BitRotCases, CorruptObjectCases
from hicache_conformance.cases.deadlines import DeadlineCases
from hicache_conformance.cases.existence import ExistenceCases
from hicache_conformance.cases.faults import DirectoryCases, FaultCases
from hicache_conformance.cases.identity import IdentityCases, KeyCases
from hicache_conformance.cases.lifecycle import LifecycleCases
from hicache_conformance.cases.members import MemberCases
from hicache_conformance.cases.misuse import MisuseCases
from hicache_conformance.cases.pages import ReadingCases, WritingCases
from hicache_conformance.cases.partial_sets import AppliedCases, StallCases
from hicache_conformance.cases.pools import HostPoolCases, PoolCases
from hicache_conformance.cases.processes import DurabilityCases, ProcessCases, SharingCases
from hicache_conformance.cases.random_calls import HistoryCases, PlanCases
from hicache_conformance.cases.removals import ClearingCases, FailedClearCases, RemovalCases
from hicache_conformance.cases.shards import ShardCases
from hicache_conformance.fixtures.target import DriverTarget
from hicache_conformance.model.case import cases_of

if TYPE_CHECKING:
    from hicache_conformance.model.outcomes import Case


# pytest runs the cases of the last base first.
class DriverConformance(
    DurabilityCases,
    ProcessCases,
    SharingCases,
    PlanCases,
    MemberCases,
    DeadlineCases,
    BitRotCases,
    DirectoryCases,
    StallCases,
    FailedClearCases,
    AppliedCases,
    FaultCases,
    BudgetCases,
    EvictionProcessCases,
    EvictionCases,
    SpaceCases,
    StatsCases,
    MisuseCases,
    LifecycleCases,
    ConcurrencyCases,
    HistoryCases,
    ClearingCases,
    RemovalCases,
    ShardCases,
    IdentityCases,
    KeyCases,
    PoolCases,
    HostPoolCases,
    CorruptObjectCases,
    WritingCases,
    ReadingCases,
    ExistenceCases,
    DriverTarget,
):
    """The conformance suite for one driver, in the author's own pytest.

    ```python
    from hicache_conformance import DriverConformance

    class TestAcme(DriverConformance):
        driver = "acme"
        config = {"path": "{tmp}/store"}
    ```
    """


@cache
def catalogue() -> dict[str, Case]:
    """All cases of the suite, by the name of their function, in the order of their definition."""
    return cases_of(DriverConformance)
