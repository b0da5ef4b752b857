"""The process of a peer: does what it is asked, and tells what happens as it happens."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
import traceback
from random import Random
from typing import TYPE_CHECKING

from hicache_conformance.harness.page_patterns import PageBook
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import Subject
from hicache_conformance.history.workload import Lane, Workload
from hicache_conformance.model.violation import Violation
from hicache_conformance.processes.channel import Channel
from hicache_conformance.processes.messages import (
    Ask,
    Broken,
    Count,
    Counted,
    Open,
    Ready,
    Request,
    Run,
    Shut,
    Unusable,
    Violated,
)
from hicache_storage.plugins import create_storage
from hicache_storage.spec import DriverError

if TYPE_CHECKING:
    import msgspec


class _Peer:
    """A storage, and the lanes that use it."""

    def __init__(self, channel: Channel[Request], order: Open) -> None:
        if order.clock:
            _set_clock(order.clock)
        self._channel, self._name, self._seed = channel, order.name, order.seed
        self._book, self._numbers = PageBook(), itertools.count()
        storage = create_storage(order.driver, order.identity, order.config, options=order.options)
        memories = {
            pool: GuardedPool(pages=shape.pages, page_size=shape.page_size, components=shape.components)
            for pool, shape in order.pools.items()
        }
        self._subject = Subject(storage, memories, self._book, Random(self._seed))
        for pool, memory in memories.items():
            self._subject.call(
                "register_mem_host_pool_v2",
                lambda m=memory, p=pool: storage.register_mem_host_pool_v2(m.host_pool, p),  # type: ignore[misc]
            )
        self._subject.call("on_host_pools_registered", storage.on_host_pools_registered)
        self._subject.call("open", storage.open)

    def do(self, order: Request) -> msgspec.Struct:
        """Do what is asked; the last message of the answer."""
        match order:
            case Ask():
                lane = Lane(self._name, self._subject, self._book, self._channel.send, self._numbers)
                lane.call(order.call, order.keys, order.pool, order.value)
            case Run():
                self._run(order.work)
            case Count():
                return Counted(stats=self._subject.stats(order.pool))
            case _:
                self._subject.call("close", self._subject.storage.close)
        return Ready()

    def _run(self, work: Workload) -> None:
        errors = list[BaseException]()

        def run(number: int) -> None:
            share = self._subject.lane(number, work.lanes, Random(f"{self._seed}/{number}"))
            lane = Lane(f"{self._name}.{number}", share, self._book, self._channel.send, self._numbers)
            try:
                lane.run(work, number)
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(work.lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _set_clock(ahead: float) -> None:
    """Let the clock of this process be ahead, before the driver is loaded; times of files are still the kernel's."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead
    time.time_ns = lambda: nanoseconds() + int(ahead * 1e9)


def serve(descriptor: int) -> None:
    """Do what is asked over a socket until it is closed, or a storage has been closed."""
    channel = Channel[Request](socket.socket(fileno=descriptor), Request)
    peer: _Peer | None = None
    # Where the suite has gone, nobody is left to be told.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order = channel.receive()
            try:
                if isinstance(order, Open):
                    peer = _Peer(channel, order)
                    channel.send(Ready())
                    continue
                assert peer is not None
                channel.send(peer.do(order))
            except DriverError as error:
                channel.send(Unusable(reason=str(error)))
            except Violation as violation:
                channel.send(Violated(rule=violation.rule, message=_without_rule(violation)))
            except ConnectionError:
                raise
            except BaseException:  # noqa: BLE001 - told to the suite
                channel.send(Broken(traceback=traceback.format_exc()))
            if isinstance(order, Shut):
                break


def _without_rule(violation: Violation) -> str:
    return str(violation).removeprefix(f"{violation.rule}: ") if violation.rule else str(violation)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
