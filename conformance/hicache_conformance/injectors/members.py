"""The injector `members`: one of several stores is killed, stopped or cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from hicache_conformance.injectors.active_faults import find_fault
from hicache_conformance.injectors.servers import ServerInjector, Servers
from hicache_conformance.injectors.tcp_proxy import TcpProxyInjector
from hicache_conformance.model.fault_plan import FaultKind, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


OUTAGES: Final = {"killed": FaultKind.KILL, "stopped": FaultKind.HANG, "cut-off": FaultKind.REFUSE}
"""What a store can come to; it is cut off by a proxy, where an option has its port."""


class MemberInjector(ServerInjector):
    """A store of several at a time, each a server; `Fault.member` names it.

    All servers are its own: a store that was killed may be known to the others for a while, which
    no case shall meet that is about something else.

    Args:
        members: the ports of those that are stores.
        proxied: the ports that a proxy stands before.

    Raises:
        Inconclusive: a server did not come up.
    """

    name: ClassVar[str] = "members"

    def __init__(
        self, commands: Sequence[Sequence[str]], members: Sequence[str], proxied: Sequence[str]
    ) -> None:
        super().__init__(Servers(commands))
        self.members = tuple(members)
        self._network: TcpProxyInjector | None = None
        try:
            self._services.start()
            if proxied:
                servers = {name: self._services.ports[name] for name in proxied}
                self._network = TcpProxyInjector(servers)
        except BaseException:
            self.close()
            raise

    @property
    def ports(self) -> Mapping[str, int]:
        return {**self._services.ports, **(self._network.ports if self._network else {})}

    def apply(self, plan: FaultPlan) -> None:
        super().apply(plan)
        if find_fault(plan.faults, FaultKind.REFUSE):
            if self._network is None:
                raise ValueError(f"no proxy stands before the stores of {plan}")
            self._network.apply(plan)

    def heal(self) -> None:
        super().heal()
        if self._network is not None:
            self._network.heal()

    def close(self) -> None:
        """End all servers."""
        if self._network is not None:
            self._network.close()
        self._services.close()
        super().close()
