"""Worker processes, each with one storage of the driver under test, driven from a case.

They are forks of an interpreter that has imported slow third-party modules, and no driver and
nothing of this project: a fork imports the driver as a new interpreter would, in a tenth of the
time. Forks share the hash seed and nothing else of an interpreter's start; a case that depends on
it asks for a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.driver_calls import CallSteps
from hicache_conformance.harness.pools import PagePatterns, PoolShape, make_pools
from hicache_conformance.harness.process_state import CauseLog, cause_log
from hicache_conformance.harness.storage_under_test import StorageUnderTest
from hicache_conformance.history.events import Begun, Call, Client, Ended, Event, Recorder, Workload
from hicache_conformance.model.case import Inconclusive, Violation
from hicache_conformance.model.cause import Cause, cause_of
from hicache_storage.plugins import create_storage
from hicache_storage.spec import DriverError, PoolName, PoolStats, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from hicache_storage.layers import StorageOptions


_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStorage:
    """The storage that a worker opens."""

    name: str
    """Of the worker, for the report."""
    driver: str
    config: Mapping[str, object]
    identity: StorageIdentity
    pools: Mapping[str, PoolShape]
    options: StorageOptions | None = None
    seed: str = ""
    """Of the places in the pools."""
    clock: float = 0.0
    """Seconds by which the clock of the process is ahead of this machine's; behind it if negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A request has come to its end."""

    result: Any = None
    error: BaseException | None = None
    """A rule that the driver broke, a driver that cannot be made there, or an error of the suite."""
    causes: list[Cause] = field(default_factory=list[Cause])
    """Exceptions that were answered as misses since the last request."""


def serve(connection: Connection, setup: WorkerStorage, environment: Mapping[str, str]) -> None:
    """Open a storage, and execute requests until the connection is closed, or the storage."""
    # A session of its own, so that a kill also reaches what a driver has started there.
    os.setsid()
    # Nothing outlives the process that has started it, nor the suite, with which that one ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A fork has the environment of the time when its fork server was started.
    os.environ.clear()
    os.environ.update(environment)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    worker = _Worker(connection, setup)
    # Without the suite, there is no receiver for an answer.
    with contextlib.suppress(EOFError, ConnectionError), cause_log() as log:
        worker.publish(_attempt(setup.name, worker.open, log))
        while not worker.closed:
            name, arguments = connection.recv()
            ask = partial(getattr(worker, name), *arguments)
            worker.publish(_attempt(setup.name, ask, log))


def _attempt(name: str, ask: Callable[[], object], log: CauseLog) -> Done:
    result: object = None
    told: BaseException | None = None
    try:
        result = ask()
    except DriverError as error:
        told = Inconclusive(f"a process of its own cannot use the driver: {error}")
    except Violation as violation:
        if violation.__cause__ is not None:
            log.note([cause_of(violation.__cause__)])
        told = Violation(violation.rule, f"{violation.message} (process {name})")
    # The suite is gone. Only an error of the driver is worth a message.
    except ConnectionError:
        raise
    except BaseException:  # noqa: BLE001 - sent to the suite
        told = RuntimeError(f"the suite broke in process {name}:\n{traceback.format_exc()}")
    return Done(result=result, error=told, causes=log.take())


class _Worker:
    """A storage, and the clients that use it; requests are names of its methods."""

    def __init__(self, connection: Connection, setup: WorkerStorage) -> None:
        self._connection = connection
        self._setup = setup
        self._patterns = PagePatterns()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.closed = False

    def publish(self, message: Begun | Ended | Done) -> None:
        """Send a message, which arrives also if this process is killed in the next instant."""
        # One at a time: two threads of a workload could send their messages into each other.
        with self._lock:
            self._connection.send(message)

    def open(self) -> None:
        """Make the storage, register its pools and open it."""
        setup = self._setup
        # Before the driver is imported, because it may do `from time import time`.
        if setup.clock:
            _set_clock(setup.clock)
        storage = create_storage(
            setup.driver, setup.identity, dict(setup.config), options=setup.options
        )
        self._sut = StorageUnderTest(
            storage, make_pools(setup.pools), self._patterns, Random(setup.seed)
        )
        self._sut.register_pools()
        self._sut.call("open", storage.open)
        self._steps = CallSteps(storage, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def call(
        self, call: Call, keys: list[str], pool: str, value: int, killed_at: int | None
    ) -> tuple[Ended, int]:
        """Make one call; its end, and the number of its steps where they were counted.

        Args:
            killed_at: step of the call after which the process kills itself; 0 counts them alone.
        """
        self._steps.at = killed_at
        return self._client(self._setup.name, self._sut).call(call, keys, pool, value), (
            self._steps.count
        )

    def run(self, work: Workload) -> None:
        """Run a workload."""

        def run(number: int) -> None:
            random = Random(f"{self._setup.seed}/{number}")
            share = self._sut.client(number, work.clients, random)
            self._client(f"{self._setup.name}.{number}", share).run(work, number)

        # The suite watches for a hang.
        together("", [partial(run, number) for number in range(work.clients)], seconds=None)

    def stats(self, pool: str) -> PoolStats:
        """A pool's counters."""
        return self._sut.stats(pool)

    def close(self) -> None:
        """Close the storage, after which the process ends."""
        self.closed = True
        self._sut.call("close", self._sut.storage.close)

    def _client(self, name: str, share: StorageUnderTest) -> Client:
        return Client(name, share, self._patterns, self.publish, self._numbers)


def _set_clock(ahead: float) -> None:
    """Set the clock of this process ahead, before the driver is loaded.

    Times of files stay the kernel's.
    """
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead
    time.time_ns = lambda: nanoseconds() + int(ahead * 1e9)


Message = Begun | Ended | Done

SILENCE_SECONDS: Final = 90.0
"""A process that has said nothing for this long hangs: three times the deadline that a call has by
itself."""
REAP_SECONDS: Final = 10.0
"""A killed process that is still there after this long waits in the kernel for a store that does
not answer."""
MIN_SPREAD_SECONDS: Final = 300e-6
MAX_MESSAGES: Final = 64
PRELOADED: Final = ("msgspec", "pytest", "torch", "xxhash")
"""Slow modules, of which none draws random numbers when it is imported."""
ENGINES: Final = (
    "sglang",
    "vllm.v1.kv_offload.tiering.base",
    "lmcache.v1.distributed.memory_manager",
)
"""Modules of engines, preloaded where the suite's process has imported them: a foreign driver needs
its engine in each worker, which takes seconds to import. Storage drivers are not among what these
modules import."""


class WorkerProcess:
    """A process with one open storage. For one thread of the suite.

    Its `recorder` holds all its calls. It executes one request at a time; while it runs a workload,
    `watch` has to read its events.

    Args:
        fresh: a new interpreter, with a hash seed of its own; takes a second.
        log: where exceptions go that are answered as misses there.

    Raises:
        Inconclusive: the driver cannot be found, or made, in another process.
        Violation: opening raised, or ended the process.
    """

    def __init__(
        self, setup: WorkerStorage, *, fresh: bool = False, log: CauseLog | None = None
    ) -> None:
        self.name = setup.name
        self.identity: StorageIdentity = setup.identity
        self._log = log
        # Kept by the suite and not by the worker, so that the history outlives a kill.
        self.recorder = Recorder()
        self.busy = True
        """A request has been sent and is not done yet."""
        self.ended = False
        self.swallowed = 0
        """Exceptions that its storage has answered as misses."""
        self._died = ""
        self.channel, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = _started(fresh, theirs, setup)
        self.pid: int = self._process.pid or 0
        # Otherwise a suite that ends in the middle of a case would wait for it.
        atexit.register(self.kill)
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise

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

    def call_killed(self, call: Call, keys: Sequence[str], value: int, at: int) -> int:
        """Make a call, and end the process, after step `at` of the call if it has so many.

        Returns:
            The number of steps, where the call has come to its end.
        """
        self._send("call", call, list(keys), PoolName.KV, value, at)
        steps = 0
        with contextlib.suppress(EOFError, OSError):
            while self.busy:
                if not self.channel.poll(SILENCE_SECONDS):
                    raise self.hangs()
                self._note(message := self.channel.recv())
                steps = message.result[1] if isinstance(message, Done) else 0
        self.kill()
        return steps

    def stats(self, pool: str = PoolName.KV) -> PoolStats:
        """A pool's counters."""
        self._send("stats", pool)
        counted: PoolStats = self.wait()
        return counted

    def start(self, work: Workload) -> None:
        """Begin a workload; `watch` waits for its end."""
        self._send("run", work)

    def close(self) -> None:
        """Close the storage, and end the process.

        Raises:
            Violation: closing raised, or did not come to its end.
        """
        if self.ended:
            return
        try:
            if not self.busy:
                self._send("close")
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
        atexit.unregister(self.kill)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # Where it is not in its own session yet.
        self._process.kill()
        self._process.join(REAP_SECONDS)
        status = self._process.exitcode
        try:
            # What the worker had sent before it was killed is still in the socket, and belongs to
            # the history: a set that was acknowledged there binds the driver.
            with contextlib.suppress(EOFError, OSError):
                while status is not None:
                    self._note(self.channel.recv())
        finally:
            self.channel.close()
        if status is None:
            raise Violation(
                "FT-3", f"process {self.name} was killed in {self._doing()}, and does not end"
            )
        self._process.close()
        self._died = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )

    def wait(self) -> Any:
        """Wait until the request is done; its result.

        Raises:
            Violation: it broke a rule, died, or hangs (FT-3).
            Inconclusive: the driver cannot be made there.
            RuntimeError: the suite itself broke there.
        """
        message: Message | None = None
        while self.busy:
            if not self.channel.poll(SILENCE_SECONDS):
                raise self.hangs()
            message = self._receive()
        return message.result if isinstance(message, Done) else None

    def arrived(self) -> list[Message]:
        """Process the messages that have arrived, and return them.

        Raises:
            Violation: as `wait`, and so the others.
        """
        messages = list[Message]()
        # Some at a time: a fast driver sends them as fast as they are read.
        while self.busy and len(messages) < MAX_MESSAGES and self.channel.poll():
            messages.append(self._receive())
        return messages

    def hangs(self) -> Violation:
        """Kill a process that has stopped answering, and return the violation."""
        doing = self._doing()
        self.kill()
        return Violation(
            "FT-3",
            f"process {self.name} has not come back from {doing} after {SILENCE_SECONDS:.0f} s",
        )

    def _ask(self, call: Call, keys: Sequence[str], pool: str, value: int = 0) -> Ended:
        self._send("call", call, list(keys), pool, value, None)
        ended: Ended = self.wait()[0]
        return ended

    def _send(self, name: str, *arguments: object) -> None:
        if self.busy or self.ended:
            raise RuntimeError(f"process {self.name} is {'busy' if self.busy else 'dead'}")
        self.busy = True
        with contextlib.suppress(ConnectionError):  # it has died; the next read raises
            self.channel.send((name, arguments))

    def _receive(self) -> Message:
        try:
            message: Message = self.channel.recv()
        # A last message that is not whole is what its sender was killed in.
        except (EOFError, OSError):
            doing = self._doing()
            self.kill()
            raise Violation("", f"process {self.name} {self._died} in {doing}") from None
        self._note(message)
        return message

    def _note(self, message: Message) -> None:
        if not isinstance(message, Done):
            self.recorder.note(message)
            return
        self.swallowed += len(message.causes)
        if self._log is not None:
            self._log.note(message.causes)
        if message.error is not None:
            raise message.error
        self.busy = False

    def _doing(self) -> str:
        running = self.recorder.running()
        if running is None:
            return "opening or closing its storage"
        seconds = (time.monotonic_ns() - running.at) / 1e9
        return (
            f"a {running.call} of {len(running.keys)} pages that had begun {seconds:.1f} s before"
        )


def _started(fresh: bool, theirs: connection.Connection, setup: WorkerStorage) -> BaseProcess:
    arguments = (theirs, setup, dict(os.environ))
    process: BaseProcess
    if fresh:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
        with mock.patch.dict(os.environ):
            # A fixed hash seed would make two interpreters as alike as two forks.
            os.environ.pop("PYTHONHASHSEED", None)
            process.start()
        return process
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(
        [*PRELOADED, *(engine for engine in ENGINES if engine in sys.modules)]
    )
    process = forks.Process(target=serve, args=arguments)
    process.start()
    return process


@dataclass(frozen=True, slots=True)
class KillSchedule:
    """Time to kill a worker."""

    after_calls: int
    """That many calls have begun."""
    fraction: float
    """And then so much of the time has passed that two of its calls took on average, from 0 to 1.
    Its first call does not count, which opens the store: with `after_calls` of at least 3, half of
    the kills fall into the call that has begun."""


def watch(
    workers: Sequence[WorkerProcess], kills: Mapping[WorkerProcess, KillSchedule] | None = None
) -> None:
    """Read events until every workload has come to its end or its process has been killed.

    Raises:
        Violation: a rule was broken, a process died by itself, or hangs (FT-3).
    """
    killers = {worker: _Killer(worker, schedule) for worker, schedule in (kills or {}).items()}
    heard_at = {worker: time.monotonic() for worker in workers}
    while busy := {worker.channel: worker for worker in workers if worker.busy}:
        # A second at most, so that the silence of a worker is noticed although no other one says
        # anything.
        for ready in connection.wait(list(busy), 1.0):
            worker = next(worker for channel, worker in busy.items() if channel is ready)
            heard_at[worker] = time.monotonic()
            messages = worker.arrived()
            if worker in killers:
                killers[worker].kill_if_due(messages)
        for worker in busy.values():
            if worker.busy and time.monotonic() - heard_at[worker] > SILENCE_SECONDS:
                raise worker.hangs()


class _Killer:
    """Kills one worker."""

    def __init__(self, worker: WorkerProcess, schedule: KillSchedule) -> None:
        self._worker = worker
        self._schedule = schedule
        self._warm_at: int | None = None
        self._begun = 0
        self._ended = 0
        self._busy_ns = 0

    def kill_if_due(self, messages: Sequence[Message]) -> None:
        """Take messages of a workload, and kill if the moment has come."""
        for message in messages:
            if isinstance(message, Begun):
                self._begun += 1
            elif isinstance(message, Ended):
                self._ended += 1
                # From the end of the first call on, which opened connections and files and would
                # make calls look longer than they are.
                self._warm_at = self._warm_at or message.at
                self._busy_ns = message.at - self._warm_at
        if self._begun < self._schedule.after_calls or not self._worker.busy:
            return
        spread = 2e-9 * self._busy_ns / (self._ended - 1) if self._ended > 1 else 0.0
        # At least `MIN_SPREAD_SECONDS`: calls of a fast driver are over before the next message is
        # read, and all kills would fall between them.
        time.sleep(self._schedule.fraction * max(spread, MIN_SPREAD_SECONDS))
        self._worker.kill()
