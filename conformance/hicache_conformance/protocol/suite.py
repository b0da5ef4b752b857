"""`MetadataConformance`: all cases in one class, in the order in which they run."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hicache_conformance.model.case import cases_of
from hicache_conformance.protocol.cases.browsers import BrowserCases
from hicache_conformance.protocol.cases.chains import ChainCases
from hicache_conformance.protocol.cases.clients import ClientCases
from hicache_conformance.protocol.cases.confirming import ConfirmingCases
from hicache_conformance.protocol.cases.deleting import DeletingCases
from hicache_conformance.protocol.cases.documents import DocumentCases
from hicache_conformance.protocol.cases.finding import FindingCases
from hicache_conformance.protocol.cases.initializing import InitializingCases
from hicache_conformance.protocol.cases.leasing import LeasingCases
from hicache_conformance.protocol.cases.limits import LimitCases
from hicache_conformance.protocol.cases.looking import LookingCases
from hicache_conformance.protocol.cases.malformed import MalformedCases
from hicache_conformance.protocol.cases.operating import OperatingCases
from hicache_conformance.protocol.cases.quarantine import QuarantineCases
from hicache_conformance.protocol.cases.refusing import RefusingCases
from hicache_conformance.protocol.cases.reserving import ReservingCases
from hicache_conformance.protocol.cases.restarting import RestartingCases
from hicache_conformance.protocol.cases.retrying import RetryingCases
from hicache_conformance.protocol.cases.tokens import TokenCases
from hicache_conformance.protocol.rules import rules_of
from hicache_conformance.protocol.target import ServerTarget

if TYPE_CHECKING:
    from collections.abc import Collection

    from hicache_conformance.model.case import Case


# The cases of the last base come first.
class MetadataConformance(
    RestartingCases,
    OperatingCases,
    BrowserCases,
    TokenCases,
    RefusingCases,
    LimitCases,
    RetryingCases,
    ChainCases,
    QuarantineCases,
    LeasingCases,
    LookingCases,
    DocumentCases,
    MalformedCases,
    ClientCases,
    DeletingCases,
    ConfirmingCases,
    ReservingCases,
    FindingCases,
    InitializingCases,
    ServerTarget,
):
    """The whole suite."""


@cache
def protocol_cases() -> dict[str, Case]:
    """All cases, by the name of their function."""
    return cases_of(MetadataConformance)


def cases_of_parts(parts: Collection[str]) -> dict[str, Case]:
    """The cases all of whose rules are of these parts."""
    rules = rules_of(parts)
    return {
        name: case
        for name, case in protocol_cases().items()
        if all(rule in rules for rule in case.rules)
    }
