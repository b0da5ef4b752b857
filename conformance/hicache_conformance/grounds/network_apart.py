"""The ground `network` in a process of its own.

A driver whose library holds the interpreter's lock while it waits for its server would wait for ever for proxies in the same process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from hicache_conformance.faults.plan import FaultPlan  # noqa: TC001 - a field's type is looked up when it is decoded
from hicache_conformance.grounds.ground import Ground
from hicache_conformance.grounds.network import NetworkGround

if TYPE_CHECKING:
    from collections.abc import Mapping

_SERVE: Final = "from hicache_conformance.grounds.network_apart import serve; serve()"


class _Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the process is told, a line each; it answers each with a line."""

    do: str
    servers: dict[str, int] = {}
    plan: FaultPlan | None = None


class NetworkApart(Ground):
    """Proxies as those of `NetworkGround`, which the process runs and this one commands."""

    name: ClassVar[str] = NetworkGround.name

    def __init__(self, servers: Mapping[str, int]) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # Its standard input ends with this process, and then it ends too.
        self._process = subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ports = msgspec.convert(self._tell(_Order("listen", servers=dict(servers))), dict[str, int])

    @property
    def ports(self) -> Mapping[str, int]:
        return self._ports

    def apply(self, plan: FaultPlan) -> None:
        self._tell(_Order("apply", plan=plan))

    def heal(self) -> None:
        self._tell(_Order("heal"))

    def requests(self) -> int:
        return int(self._tell(_Order("requests")))

    def struck(self) -> int:
        return int(self._tell(_Order("struck")))

    def close(self) -> None:
        self._tell(_Order("close"))
        self._process.communicate()

    def _tell(self, order: _Order) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the ground 'network' ended with {self._process.wait()}")
        return msgspec.json.decode(answer)


def serve() -> None:
    """Run the proxies, and obey until standard input ends."""
    ground: NetworkGround | None = None
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=_Order)
        answer: object = None
        if ground is None:
            ground = NetworkGround(order.servers)
            answer = dict(ground.ports)
        elif order.do == "apply" and order.plan is not None:
            ground.apply(order.plan)
        elif order.do == "requests":
            answer = ground.requests()
        elif order.do == "struck":
            answer = ground.struck()
        elif order.do == "heal":
            ground.heal()
        elif order.do == "close":
            ground.close()
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
