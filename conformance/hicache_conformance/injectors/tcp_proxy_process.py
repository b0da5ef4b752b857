"""The injector `network` in a subprocess.

A driver whose library holds the interpreter's lock while it waits for its server would wait for
ever for proxies in the same process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec

from hicache_conformance.injectors.injector import FaultInjector
from hicache_conformance.injectors.tcp_proxy import TcpProxyInjector
from hicache_conformance.model.fault_plan import FaultPlan  # noqa: TC001 - a field's type is looked up when it is decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

_SERVE: Final = "from hicache_conformance.injectors.tcp_proxy_process import serve; serve()"


class _Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command to the subprocess, one a line; it answers each with a line."""

    do: Literal[
        "listen", "apply", "heal", "requests", "hold_replies", "waits", "injected_count", "close"
    ]
    servers: dict[str, int] = {}
    """To stand before, for `listen`, which comes first."""
    plan: FaultPlan | None = None
    """For `apply`."""
    quiet_seconds: float = 0.0
    """For `hold_replies`."""


class TcpProxyProcess(FaultInjector):
    """Proxies as those of `TcpProxyInjector`, which the process runs and this one commands."""

    name: ClassVar[str] = TcpProxyInjector.name

    def __init__(self, servers: Mapping[str, int]) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # It ends when its standard input does, and so with this process; a Ctrl-C at the terminal
        # is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        try:
            self._ports = msgspec.convert(
                self._tell(_Command("listen", servers=dict(servers))), dict[str, int]
            )
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    @property
    def ports(self) -> Mapping[str, int]:
        return self._ports

    def apply(self, plan: FaultPlan) -> None:
        self._tell(_Command("apply", plan=plan))

    def heal(self) -> None:
        self._tell(_Command("heal"))

    def requests(self) -> int:
        return int(self._tell(_Command("requests")))

    def hold_replies(self, quiet_seconds: float) -> None:
        self._tell(_Command("hold_replies", quiet_seconds=quiet_seconds))

    def waits(self) -> int:
        return int(self._tell(_Command("waits")))

    def injected_count(self) -> int:
        return int(self._tell(_Command("injected_count")))

    def close(self) -> None:
        """Idempotent; harmless where the process has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(RuntimeError):
                self._tell(_Command("close"))
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.communicate()

    def _tell(self, command: _Command) -> Any:
        """Give an command; the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        # Commands come from several threads of a case, and an answer belongs to the command before
        # it.
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the process of the injector 'network' ended with {self._process.wait()}"
            )
        return msgspec.json.decode(answer)


def serve() -> None:
    """Run the proxies, and obey until standard input ends."""
    commands = (msgspec.json.decode(line, type=_Command) for line in sys.stdin.buffer)
    injector = TcpProxyInjector(next(commands).servers)
    _answer(dict(injector.ports))
    for command in commands:
        _answer(_obey(injector, command))


def _obey(injector: TcpProxyInjector, command: _Command) -> int | None:
    match command.do:
        case "requests":
            return injector.requests()
        case "waits":
            return injector.waits()
        case "hold_replies":
            injector.hold_replies(command.quiet_seconds)
        case "injected_count":
            return injector.injected_count()
        case "apply" if command.plan is not None:
            injector.apply(command.plan)
        case "heal":
            injector.heal()
        case _:
            injector.close()
    return None


def _answer(answer: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
