"""The injector `members`: one of several stores is killed, stopped or cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from hicache_conformance.injectors.injector import FaultInjector
from hicache_conformance.injectors.servers import Servers
from hicache_conformance.injectors.tcp_proxy_process import TcpProxyProcess
from hicache_conformance.model.fault_plan import FaultKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.model.fault_plan import FaultPlan

OUTAGES: Final = {
    "killed": FaultKind.KILL,
    "stopped": FaultKind.HANG,
    "cut-off": FaultKind.REFUSE,
}
"""What a store can come to; it is cut off by a proxy, where an option has its port."""


class MemberInjector(FaultInjector):
    """A store of several at a time, each a server; `Fault.member` names it.

    All servers are its own: a store that was killed may be known to the others for a while, which
    no case shall meet that is about something else.

    Args:
        commands: of all servers.
        members: the ports of those that are stores.
        proxied: the ports that a proxy stands before.

    Raises:
        Inconclusive: a server did not come up.
    """

    name: ClassVar[str] = "members"

    def __init__(
        self, commands: Sequence[Sequence[str]], members: Sequence[str], proxied: Sequence[str]
    ) -> None:
        super().__init__()
        self.members = tuple(members)
        self._struck = 0
        self._network: TcpProxyProcess | None = None
        self._servers = Servers(commands)
        try:
            self._servers.start()
            if proxied:
                servers = {name: self._servers.ports[name] for name in proxied}
                self._network = TcpProxyProcess(servers)
        except BaseException:
            self._servers.close()
            raise

    @property
    def ports(self) -> Mapping[str, int]:
        return {**self._servers.ports, **(self._network.ports if self._network else {})}

    def apply(self, plan: FaultPlan) -> None:
        self._struck = len(plan.faults)
        for fault in plan.faults:
            match fault.kind:
                case FaultKind.KILL:
                    self._servers.kill(fault.member)
                case FaultKind.HANG:
                    self._servers.suspend(fault.member)
                case _ if self._network is not None:
                    self._network.apply(plan)
                case _:
                    raise ValueError(f"no proxy stands before {fault.member!r}")

    def heal(self) -> None:
        self._servers.resume()
        self._servers.start()
        if self._network is not None:
            self._network.heal()

    def requests(self) -> int:
        """Not known here; the injector `network` counts them."""
        return 0

    def injected_count(self) -> int:
        return self._struck

    def close(self) -> None:
        """End all servers."""
        if self._network is not None:
            self._network.close()
        self._servers.close()
