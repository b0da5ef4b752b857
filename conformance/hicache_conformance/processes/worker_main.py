"""Main program of a worker process: executes requests, and publishes events as they happen."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from random import Random

from hicache_conformance.harness.call_steps import CallSteps
from hicache_conformance.harness.log_records import cause_log
from hicache_conformance.harness.page_patterns import PagePatterns
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import StorageUnderTest
from hicache_conformance.history.workload import Client, Workload
from hicache_conformance.model.cause import cause_of
from hicache_conformance.model.violation import Violation
from hicache_conformance.processes.channel import Channel
from hicache_conformance.processes.messages import (
    Answer,
    CloseStorage,
    Counted,
    DriverUnusable,
    MakeCall,
    OpenStorage,
    ReadStats,
    Ready,
    Request,
    RunWorkload,
    SuiteBroken,
    Swallowed,
    Violated,
)
from hicache_storage.plugins import create_storage
from hicache_storage.spec import DriverError


class _Worker:
    """A storage, and the clients that use it."""

    def __init__(self, channel: Channel[Request], request: OpenStorage) -> None:
        # Before the driver is imported, because it may do `from time import time`.
        if request.clock:
            _set_clock(request.clock)
        self._channel = channel
        self._name = request.name
        self._seed = request.seed
        self._patterns = PagePatterns()
        self._numbers = itertools.count()
        storage = create_storage(
            request.driver, request.identity, request.config, options=request.options
        )
        memories = {
            pool: GuardedPool(
                pages=shape.pages, page_size=shape.page_size, components=shape.components
            )
            for pool, shape in request.pools.items()
        }
        self._sut = StorageUnderTest(storage, memories, self._patterns, Random(self._seed))
        for pool, memory in memories.items():
            self._sut.call(
                "register_mem_host_pool_v2",
                lambda m=memory, p=pool: storage.register_mem_host_pool_v2(m.host_pool, p),  # type: ignore[misc]
            )
        self._sut.call("on_host_pools_registered", storage.on_host_pools_registered)
        self._sut.call("open", storage.open)
        self._steps = CallSteps(storage, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def do(self, request: Request) -> Answer:
        """Execute a request; return the last message of the answer."""
        match request:
            case MakeCall():
                client = Client(
                    self._name, self._sut, self._patterns, self._channel.send, self._numbers
                )
                self._steps.at = request.killed_at
                client.call(request.call, request.keys, request.pool, request.value)
                return Ready(steps=self._steps.count)
            case RunWorkload():
                self._run(request.work)
            case ReadStats():
                return Counted(stats=self._sut.stats(request.pool))
            case _:
                self._sut.call("close", self._sut.storage.close)
        return Ready()

    def _run(self, work: Workload) -> None:
        errors = list[BaseException]()

        def run(number: int) -> None:
            share = self._sut.client(number, work.clients, Random(f"{self._seed}/{number}"))
            client = Client(
                f"{self._name}.{number}", share, self._patterns, self._channel.send, self._numbers
            )
            try:
                client.run(work, number)
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(number,), daemon=True)
            for number in range(work.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _set_clock(ahead: float) -> None:
    """Set the clock of this process ahead, before the driver is loaded.

    Times of files stay the kernel's.
    """
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead
    time.time_ns = lambda: nanoseconds() + int(ahead * 1e9)


def serve(descriptor: int) -> None:
    """Execute requests from a socket until it is closed, or the storage has been closed."""
    channel = Channel[Request](socket.socket(fileno=descriptor), Request)
    worker: _Worker | None = None
    # Without the suite, there is no receiver for an answer.
    with contextlib.suppress(EOFError, ConnectionError), cause_log() as log:
        while True:
            request = channel.receive()
            answer: Answer = Ready()
            try:
                if isinstance(request, OpenStorage):
                    worker = _Worker(channel, request)
                else:
                    assert worker is not None
                    answer = worker.do(request)
            except DriverError as error:
                answer = DriverUnusable(reason=str(error))
            except Violation as violation:
                if violation.__cause__ is not None:
                    log.note([cause_of(violation.__cause__)])
                answer = Violated(rule=violation.rule, message=_without_rule(violation))
            # The suite is gone. Only an error of the driver is worth a message.
            except ConnectionError:
                raise
            except BaseException:  # noqa: BLE001 - sent to the suite
                answer = SuiteBroken(traceback=traceback.format_exc())
            # Before the answer, which may end the case.
            causes = log.take()
            if causes:
                channel.send(Swallowed(causes=causes))
            channel.send(answer)
            if isinstance(request, CloseStorage):
                break


def _without_rule(violation: Violation) -> str:
    return str(violation).removeprefix(f"{violation.rule}: ") if violation.rule else str(violation)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
