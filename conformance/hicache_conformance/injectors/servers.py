"""Servers that a driver needs, on ports that stay theirs; and the injectors `services`, `members`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from hicache_conformance.harness.ports import accepts, free_ports
from hicache_conformance.harness.process_state import processes, read_stat
from hicache_conformance.injectors.injector import FaultInjector, find_fault
from hicache_conformance.model.case import Inconclusive
from hicache_conformance.model.fault_plan import FaultKind, FaultPlan
from hicache_conformance.model.settings import filled, port_names

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

START_SECONDS: Final = 180.0
"""How long a server may take until it accepts connections."""
LEASH: Final = (
    "/bin/sh",
    "-c",
    'exec 3<&0; (read _ <&3; kill -s KILL -- -$$) & exec "$@" 3<&- </dev/null',
    "sh",
)
"""Runs a command whose group is killed when its standard input ends, so that no server outlives a
suite that was killed."""
_STILL: Final = frozenset("TtZX")
"""Stopped, traced, or ended."""
STOP_SECONDS: Final = 5.0
"""How long it may take to end by itself when it is asked to."""


class Servers:
    """Servers on free ports of 127.0.0.1, each of them a command.

    Args:
        commands: in the order of their start; `{port:NAME}` and `{tmp}` are filled in. A restarted
            server finds `{tmp}` as it left it.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self.commands = [list(command) for command in commands]
        self._home = Path(tempfile.mkdtemp(prefix="hicache-services-"))
        self.tmp = self._home / "tmp"
        self.tmp.mkdir()
        names = port_names(part for command in self.commands for part in command)
        self.ports: Mapping[str, int] = dict(zip(names, free_ports(len(names)), strict=True))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start what does not run, and wait until all its ports accept connections.

        Raises:
            Inconclusive: a server did not come up; the message has the last of what it printed.
        """
        for number, command in enumerate(self.commands):
            running = self._processes.get(number)
            if running is not None:
                if running.poll() is None:
                    continue
                assert running.stdin is not None
                running.stdin.close()
            words = [filled(word, self.tmp, self.ports) for word in command]
            with self._log(number).open("ab") as log:
                try:
                    # A group of its own, so that what a server has started is killed with it.
                    process = subprocess.Popen(
                        [*LEASH, *words],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        process_group=0,
                    )
                except OSError as error:
                    raise Inconclusive(
                        f"the server {words[0]!r} cannot be started: {error}"
                    ) from error
            self._processes[number] = process
            # Before the next server is started, which may need this one.
            for name in port_names(command):
                self._wait_for(number, words, name)

    def kill(self, port: str = "") -> None:
        """Kill all servers, or the one of a port, without a chance to save anything."""
        chosen = self._chosen(port)
        # All are signalled before any is waited for: one that loses its peer first would have time
        # to save something.
        for number in chosen:
            _signal(self._processes[number], signal.SIGKILL)
        for number in chosen:
            process = self._processes.pop(number)
            assert process.stdin is not None
            # Ends the leash, where the server itself had ended before.
            process.stdin.close()
            process.wait()

    def suspend(self, port: str = "") -> None:
        """Stop all servers where they are, or the one of a port.

        They keep their ports and their connections, and answer nothing.
        """
        chosen = [self._processes[number] for number in self._chosen(port)]
        for process in chosen:
            _signal(process, signal.SIGSTOP)
        for process in chosen:
            # SIGSTOP takes effect thread by thread; an answer that is sent after `suspend` has
            # returned would make the fault a race.
            stand_still(process.pid)

    def resume(self) -> None:
        """Let suspended servers go on."""
        for process in self._processes.values():
            _signal(process, signal.SIGCONT)

    def snapshot(self, place: Path) -> None:
        """Copy the servers' directory as it is now."""
        shutil.rmtree(place, ignore_errors=True)
        _copy(self.tmp, place)

    def restore(self, place: Path) -> None:
        """Put a snapshot in the place of the servers' directory; for servers that do not run."""
        for entry in self.tmp.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        _copy(place, self.tmp)

    def close(self) -> None:
        """Ask all servers to end, and end those that do not."""
        # A stopped process does not receive SIGTERM.
        self.resume()
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def _chosen(self, port: str) -> list[int]:
        """Numbers of the servers that were started, or of the one that listens on a port."""
        return [
            number
            for number in self._processes
            if not port or number == listener(self.commands, port)
        ]

    def _wait_for(self, number: int, words: Sequence[str], name: str) -> None:
        until, process = time.monotonic() + START_SECONDS, self._processes[number]
        while not accepts(self.ports[name]):
            if process.poll() is not None or time.monotonic() > until:
                ended = process.poll()
                self.kill()
                why = (
                    f"did not accept connections on {name} within {START_SECONDS:.0f} s"
                    if ended is None
                    else f"ended with {ended}"
                )
                raise Inconclusive(
                    f"the server {' '.join(words)!r} {why}; it said: {self._said(number)}"
                )
            time.sleep(0.01)

    def _said(self, number: int) -> str:
        said = " ".join(self._log(number).read_text("utf-8", "replace").split())
        return said[-300:] or "nothing"

    def _log(self, number: int) -> Path:
        return self._home / f"{number}.log"


class ServerInjector(FaultInjector):
    """The servers themselves: killed and restarted, set back to an older state, suspended."""

    name: ClassVar[str] = "services"

    def __init__(self, services: Servers) -> None:
        super().__init__()
        self._services = services
        self._home = Path(tempfile.mkdtemp(prefix="hicache-snapshots-"))
        self._stale = False
        self._struck = 0

    def apply(self, plan: FaultPlan) -> None:
        self._struck = len(plan.faults)
        self._stale = find_fault(plan.faults, FaultKind.STALE) is not None
        if self._stale:
            # Taken now and put back at `heal`: the servers forget what was acknowledged in between.
            self._services.snapshot(self._home / "snapshot")
        for fault in plan.faults:
            if fault.kind is FaultKind.KILL:
                self._services.kill(fault.member)
            elif fault.kind is FaultKind.HANG:
                self._services.suspend(fault.member)

    def heal(self) -> None:
        if self._stale:
            self._services.kill()
            self._services.restore(self._home / "snapshot")
            self._stale = False
        self._services.resume()
        self._services.start()

    def injected_count(self) -> int:
        return self._struck

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Copy what a directory holds; holes of files stay holes."""
    target.mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", f"{source}/.", str(target)], capture_output=True, check=True)


def listener(commands: Sequence[Sequence[str]], port: str) -> int:
    """Number of the server that listens on a port: of the first command that names it."""
    return next(number for number, command in enumerate(commands) if port in port_names(command))


def stand_still(group: int) -> None:
    """Wait until a group that was sent SIGSTOP has stopped in all its threads.

    Some go on for a moment.
    """
    while not _STILL.issuperset(_states(group)):
        time.sleep(0.001)


def _states(group: int) -> Generator[str]:
    """The state of each thread of a group, as ps(1) shows it."""
    for process, _, fields in processes():
        # What ends meanwhile has no state.
        with contextlib.suppress(OSError):
            for thread in (
                Path(f"/proc/{process}/task").iterdir() if int(fields[2]) == group else ()
            ):
                with contextlib.suppress(OSError):
                    yield read_stat(thread / "stat")[1][0]


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


class MemberInjector(ServerInjector):
    """A store of several at a time, each a server; `Fault.member` names it.

    All servers are its own: a store that was killed may be known to the others for a while, which
    no case shall meet that is about something else.

    Args:
        members: the ports of those that are stores.

    Raises:
        Inconclusive: a server did not come up.
    """

    name: ClassVar[str] = "members"

    def __init__(self, commands: Sequence[Sequence[str]], members: Sequence[str]) -> None:
        super().__init__(Servers(commands))
        self.members = tuple(members)
        try:
            self._services.start()
        except BaseException:
            self.close()
            raise

    @property
    def ports(self) -> Mapping[str, int]:
        return self._services.ports

    def close(self) -> None:
        """End all servers."""
        self._services.close()
        super().close()
