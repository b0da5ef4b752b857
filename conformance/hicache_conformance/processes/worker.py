"""A worker process with one storage of the driver under test, driven from a case."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import cache
from typing import TYPE_CHECKING, Final, Self

from hicache_conformance.harness.page_patterns import short
from hicache_conformance.history.events import Begun, Call, Ended, Event, Recorder
from hicache_conformance.model.violation import Inconclusive, Violation, checked
from hicache_conformance.processes.channel import Channel
from hicache_conformance.processes.fork_server import ForkServer
from hicache_conformance.processes.messages import (
    Answer,
    CloseStorage,
    Counted,
    DriverUnusable,
    MakeCall,
    OpenStorage,
    ReadStats,
    Ready,
    RunWorkload,
    SuiteBroken,
    Swallowed,
    Violated,
)
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.harness.log_records import CauseLog
    from hicache_conformance.history.workload import Workload
    from hicache_conformance.processes.messages import PoolShape, Request
    from hicache_storage.layers import StorageOptions
    from hicache_storage.spec import PoolStats, StorageIdentity

SILENCE_SECONDS: Final = 90.0
"""A process that has said nothing for this long hangs: three times the deadline that a call has by
itself."""


class WorkerProcess:
    """A process with one open storage. For one thread of the suite.

    Its `recorder` holds all its calls. It executes one request at a time; while it runs a workload,
    `supervisor.watch` has to read its events.
    """

    def __init__(
        self, name: str, identity: StorageIdentity, *, fresh: bool, log: CauseLog | None = None
    ) -> None:
        self.name = name
        self._log = log
        self.identity = identity
        # Kept by the suite and not by the worker, so that the history outlives a kill.
        self.recorder = Recorder()
        self._fork_server = _fork_server()
        pid, connection = self._fork_server.spawn(fresh=fresh)
        self.pid = pid
        self.channel = Channel[Answer](connection, Answer)
        self.busy = False
        """A request has been sent and is not done yet."""
        self.ended = False
        self.swallowed = 0
        """Exceptions that its storage has answered as misses."""
        self._died = ""

    @classmethod
    def open(
        cls,
        name: str,
        driver: str,
        config: Mapping[str, object],
        identity: StorageIdentity,
        *,
        pools: Mapping[str, PoolShape],
        options: StorageOptions | None,
        seed: str,
        fresh: bool,
        clock: float = 0.0,
        log: CauseLog | None = None,
    ) -> Self:
        """Start a process and open a storage in it.

        Args:
            log: where exceptions go that are answered as misses there.

        Raises:
            Inconclusive: the driver cannot be found, or made, in another process.
            Violation: opening raised, or ended the process.
        """
        worker = cls(name, identity, fresh=fresh, log=log)
        try:
            worker.send(
                OpenStorage(
                    name=name,
                    driver=driver,
                    config=dict(config),
                    identity=identity,
                    pools=dict(pools),
                    options=options,
                    seed=seed,
                    clock=clock,
                )
            )
            worker.wait()
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def events(self) -> list[Event]:
        """All its calls so far; one that it was killed in has no end."""
        return self.recorder.events()

    def set(self, keys: Sequence[str], value: int, pool: str = PoolName.KV) -> list[bool]:
        """Store pages that hold `value`; the answer, one for each key."""
        return list(self._ask(Call.SET, keys, pool, value).done)

    def get(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[int | bytes | None]:
        """Read pages.

        For each key its value, None where nothing was delivered, or the bytes of what is no whole
        page of it.
        """
        return list(self._ask(Call.GET, keys, pool).found)

    def exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> int:
        """Return the number of keys, from the first, that are there."""
        return self._ask(Call.EXISTS, keys, pool).hit

    def delete(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        """Remove pages."""
        return list(self._ask(Call.DELETE, keys, pool).done)

    def clear(self) -> None:
        """Remove all pages of the identity, of a store that works.

        Raises:
            Violation: LC-4, the clear raised.
        """
        raised = self._ask(Call.CLEAR, [], PoolName.KV).raised
        if raised:
            raise Violation(
                "LC-4", f"a clear of an idle store raised {raised} (process {self.name})"
            )

    def expect_delivered(self, keys: Sequence[str], rule: str, when: str) -> None:
        """Read pages that were set, whatever their values.

        Raises:
            Violation: `rule`; one is missing.
        """
        checked(rule)
        for index, (key, found) in enumerate(zip(keys, self.get(keys), strict=True)):
            if found is None:
                raise Violation(
                    rule,
                    f"page {index} key {short(key)} was set {when} (True), and a get of process "
                    f"{self.name} answers False",
                )

    def call_killed(self, call: Call, keys: Sequence[str], value: int, at: int) -> int:
        """Make a call, and end the process, after step `at` of the call if it has so many.

        Returns:
            The number of steps, where the call has come to its end.
        """
        self.send(MakeCall(call=call, keys=list(keys), pool=PoolName.KV, value=value, killed_at=at))
        message: Answer | None = None
        with contextlib.suppress(EOFError):
            while self.busy:
                self.note(message := self.channel.receive(SILENCE_SECONDS))
        self.kill()
        return message.steps if isinstance(message, Ready) else 0

    def stats(self, pool: str = PoolName.KV) -> PoolStats:
        """A pool's counters."""
        self.send(ReadStats(pool=pool))
        while not isinstance(counted := self._receive(), Counted):
            self.note(counted)
        self.busy = False
        return counted.stats

    def start(self, work: Workload) -> None:
        """Begin a workload; `supervisor.watch` waits for its end."""
        self.send(RunWorkload(work=work))

    def close(self) -> None:
        """Close the storage, and end the process.

        Raises:
            Violation: closing raised, or did not come to its end.
        """
        if self.ended:
            return
        try:
            if not self.busy:
                self.send(CloseStorage())
                self.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL, and read the events that it had still sent.

        Raises:
            Violation: FT-3, it cannot be killed, because it waits in the kernel.
        """
        if self.ended:
            return
        self.ended = True
        self.busy = False
        status = self._fork_server.kill(self.pid)
        try:
            # What the worker had sent before it was killed is still in the socket, and belongs to
            # the history: a set that was acknowledged there binds the driver.
            with contextlib.suppress(EOFError):
                while status is not None:
                    self.note(self.channel.receive())
        finally:
            self.channel.close()
        if status is None:
            raise Violation(
                "FT-3", f"process {self.name} was killed in {self._doing()}, and does not end"
            )
        self._died = _cause(status)

    def send(self, request: Request) -> None:
        """Send a request."""
        if self.busy or self.ended:
            raise RuntimeError(f"process {self.name} is {'busy' if self.busy else 'dead'}")
        self.busy = True
        with contextlib.suppress(ConnectionError):  # it has died; the next read raises
            self.channel.send(request)

    def wait(self) -> None:
        """Wait until the request is done.

        Raises:
            Violation: it broke a rule, died, or hangs (FT-3).
            Inconclusive: the driver cannot be made there.
        """
        while self.busy:
            self.note(self._receive())

    def note(self, message: Answer) -> None:
        """Process a message of the worker.

        Raises:
            Violation: it broke a rule.
            Inconclusive: the driver cannot be made there.
            RuntimeError: the suite itself broke there.
        """
        match message:
            case Begun() | Ended():
                self.recorder.note(message)
            case Swallowed():
                self.swallowed += len(message.causes)
                if self._log is not None:
                    self._log.note(message.causes)
            case Violated():
                raise Violation(message.rule, f"{message.message} (process {self.name})")
            case DriverUnusable():
                raise Inconclusive(f"a process of its own cannot use the driver: {message.reason}")
            case SuiteBroken():
                raise RuntimeError(f"the suite broke in process {self.name}:\n{message.traceback}")
            case _:
                self.busy = False

    def unexpected_end(self) -> Violation:
        """Return the violation or error for a process that ended without a request to."""
        doing = self._doing()
        self.kill()
        return Violation("", f"process {self.name} {self._died} in {doing}")

    def hangs(self) -> Violation:
        """Kill a process that has stopped answering, and return the violation."""
        doing = self._doing()
        self.kill()
        return Violation(
            "FT-3",
            f"process {self.name} has not come back from {doing} after {SILENCE_SECONDS:.0f} s",
        )

    def _ask(self, call: Call, keys: Sequence[str], pool: str, value: int = 0) -> Ended:
        self.send(MakeCall(call=call, keys=list(keys), pool=pool, value=value))
        answer: Ended | None = None
        while self.busy:
            message = self._receive()
            self.note(message)
            if isinstance(message, Ended):
                answer = message
        assert answer is not None
        return answer

    def _receive(self) -> Answer:
        try:
            return self.channel.receive(SILENCE_SECONDS)
        except EOFError:
            raise self.unexpected_end() from None
        except TimeoutError:
            raise self.hangs() from None

    def _doing(self) -> str:
        running = self.recorder.running()
        if running is None:
            return "opening or closing its storage"
        seconds = (time.monotonic_ns() - running.at) / 1e9
        return (
            f"a {running.call} of {len(running.keys)} pages that had begun {seconds:.1f} s before"
        )


def _fork_server() -> ForkServer:
    fork_server = _started(os.getpid())
    # It may have died, or this process may be a fork of the suite, which must not use its parent's
    # socket.
    if not fork_server.alive():
        fork_server.close()
        _started.cache_clear()
        fork_server = _started(os.getpid())
    return fork_server


@cache
def _started(pid: int) -> ForkServer:
    import atexit

    fork_server = ForkServer()
    atexit.register(lambda: fork_server.close() if os.getpid() == pid else None)
    return fork_server


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.WEXITSTATUS(status)}"
