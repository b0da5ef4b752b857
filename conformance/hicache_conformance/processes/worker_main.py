"""Main program of a worker process: executes requests, and publishes events as they happen."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.harness.call_steps import CallSteps
from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.log_records import cause_log
from hicache_conformance.harness.page_patterns import PagePatterns
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import StorageUnderTest
from hicache_conformance.history.workload import Client, Workload
from hicache_conformance.model.cause import Cause, cause_of
from hicache_conformance.model.violation import Violation
from hicache_storage.plugins import create_storage
from hicache_storage.spec import DriverError, PoolStats, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from hicache_conformance.harness.log_records import CauseLog
    from hicache_conformance.harness.pools import PoolShape
    from hicache_conformance.history.events import Begun, Call, Ended
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
    violation: tuple[str, str] | None = None
    """The rule that the driver broke, and how."""
    unusable: str = ""
    """Why the driver cannot be made in this process."""
    broken: str = ""
    """Traceback of an error of the suite itself."""
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
        worker.publish(_attempt(worker.open, log))
        while not worker.closed:
            name, arguments = connection.recv()
            worker.publish(_attempt(partial(getattr(worker, name), *arguments), log))


def _attempt(ask: Callable[[], object], log: CauseLog) -> Done:
    found: dict[str, Any] = {}
    try:
        found["result"] = ask()
    except DriverError as error:
        found["unusable"] = str(error)
    except Violation as violation:
        if violation.__cause__ is not None:
            log.note([cause_of(violation.__cause__)])
        found["violation"] = violation.rule, violation.message
    # The suite is gone. Only an error of the driver is worth a message.
    except ConnectionError:
        raise
    except BaseException:  # noqa: BLE001 - sent to the suite
        found["broken"] = traceback.format_exc()
    return Done(**found, causes=log.take())


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
        memories = {pool: GuardedPool(**asdict(shape)) for pool, shape in setup.pools.items()}
        self._sut = StorageUnderTest(storage, memories, self._patterns, Random(setup.seed))
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
