"""`MetadataConformance`: all cases in one class, in the order in which they run."""

from __future__ import annotations

from hicache_conformance.metadata.cases.browsers import BrowserCases
from hicache_conformance.metadata.cases.chains import ChainCases
from hicache_conformance.metadata.cases.clients import ClientCases
from hicache_conformance.metadata.cases.confirming import ConfirmingCases
from hicache_conformance.metadata.cases.deleting import DeletingCases
from hicache_conformance.metadata.cases.documents import DocumentCases
from hicache_conformance.metadata.cases.finding import FindingCases
from hicache_conformance.metadata.cases.initializing import InitializingCases
from hicache_conformance.metadata.cases.leasing import LeasingCases
from hicache_conformance.metadata.cases.limits import LimitCases
from hicache_conformance.metadata.cases.looking import LookingCases
from hicache_conformance.metadata.cases.malformed import MalformedCases
from hicache_conformance.metadata.cases.operating import OperatingCases
from hicache_conformance.metadata.cases.refusing import RefusingCases
from hicache_conformance.metadata.cases.reserving import ReservingCases
from hicache_conformance.metadata.cases.restarting import RestartingCases
from hicache_conformance.metadata.cases.resting import RestingCases
from hicache_conformance.metadata.cases.retrying import RetryingCases
from hicache_conformance.metadata.cases.tokens import TokenCases


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
    RestingCases,
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
):
    """The whole suite."""
