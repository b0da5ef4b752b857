"""Further addresses of one server, each of which can fail for itself."""

from __future__ import annotations

from enum import Enum

from hicache_conformance.injectors.tcp_proxy import TcpProxyInjector
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan


class Manner(Enum):
    WELL = None
    REFUSES = Fault(kind=FaultKind.REFUSE)
    RESETS = Fault(kind=FaultKind.APPLIED, operations=("request",))
    """Connections, as soon as something is asked."""
    MUTE = Fault(kind=FaultKind.APPLIED, operations=("reply",))
    """Hands on requests, and resets instead of an answer."""
    HANGS = Fault(kind=FaultKind.HANG)


class Forward(TcpProxyInjector):
    """Hands connections on to a port of this machine."""

    def __init__(self, port: int) -> None:
        super().__init__({"server": port})
        self._manner = Manner.WELL
        self.port = self.ports["server"]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def manner(self) -> Manner:
        return self._manner

    @manner.setter
    def manner(self, manner: Manner) -> None:
        self._manner = manner
        self.heal()
        if manner.value is not None:
            self.apply(FaultPlan(self.name, (manner.value,)))
