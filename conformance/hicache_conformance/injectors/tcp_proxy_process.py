"""The ground `network` in a process of its own.

A driver whose library holds the interpreter's lock while it waits for its server would wait for ever for proxies in the same process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec

from hicache_conformance.injectors.injector import Ground
from hicache_conformance.injectors.tcp_proxy import NetworkGround
from hicache_conformance.model.fault_plan import FaultPlan  # noqa: TC001 - a field's type is looked up when it is decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

_SERVE: Final = "from hicache_conformance.injectors.tcp_proxy_process import serve; serve()"


class _Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the process is told, a line each; it answers each with a line."""

    do: Literal["listen", "apply", "heal", "requests", "struck", "close"]
    servers: dict[str, int] = {}
    """To stand before, for `listen`, which comes first."""
    plan: FaultPlan | None = None
    """For `apply`."""


class NetworkApart(Ground):
    """Proxies as those of `NetworkGround`, which the process runs and this one commands."""

    name: ClassVar[str] = NetworkGround.name

    def __init__(self, servers: Mapping[str, int]) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # It ends when its standard input does, and so with this process; a Ctrl-C at the terminal is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        try:
            self._ports = msgspec.convert(self._tell(_Order("listen", servers=dict(servers))), dict[str, int])
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

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
        """Idempotent; harmless where the process has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(RuntimeError):
                self._tell(_Order("close"))
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.communicate()

    def _tell(self, order: _Order) -> Any:
        """Give an order; the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the ground 'network' ended with {self._process.wait()}")
        return msgspec.json.decode(answer)


def serve() -> None:
    """Run the proxies, and obey until standard input ends."""
    orders = (msgspec.json.decode(line, type=_Order) for line in sys.stdin.buffer)
    ground = NetworkGround(next(orders).servers)
    _answer(dict(ground.ports))
    for order in orders:
        _answer(_obey(ground, order))


def _obey(ground: NetworkGround, order: _Order) -> int | None:
    match order.do:
        case "requests":
            return ground.requests()
        case "struck":
            return ground.struck()
        case "apply" if order.plan is not None:
            ground.apply(order.plan)
        case "heal":
            ground.heal()
        case _:
            ground.close()
    return None


def _answer(answer: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
