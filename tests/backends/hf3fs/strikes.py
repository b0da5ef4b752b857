"""Servers that are killed and started again one after another, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from hicache_conformance.injectors.servers import stand_still
from hicache_metadata_server.cli.admin_client import AdminClient, RemoteError

PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 0.4
"""Between strikes, and until what was killed is started again."""
SUSPENDED_SECONDS = 1.0


class Strikes(threading.Thread):
    """Strikes one after another until its time is over, and each of them once at least.

    Args:
        servers: metadata servers on one store.
        is_whole: waits until the store has come back.
        seconds: after which no further round begins.
    """

    def __init__(self, servers, is_whole, *, seconds):
        super().__init__(name="strikes")
        self._servers, self._is_whole, self._seconds = servers, is_whole, seconds
        self.plan = list[Callable[[], None]]()
        """What is to be done in a round; methods of this one."""
        self.outages = list[tuple[int, int]]()
        """When the store was away: from its end until it and every server say that they are ready,
        by `time.monotonic_ns()`."""
        self.log = list[str]()
        self.over_at = 0
        self._error: BaseException | None = None
        self._begin = time.monotonic()

    def run(self):
        try:
            self._begin = time.monotonic()
            while not self.log or time.monotonic() - self._begin < self._seconds:
                for strike in self.plan:
                    time.sleep(PAUSE_SECONDS)
                    strike()
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self._error = error
        self.over_at = time.monotonic_ns()

    def finish(self):
        """Wait for the end; raise what went wrong."""
        self.join()
        if self._error is not None:
            raise self._error

    def kill_server(self, server):
        self._note(f"kill -9 server {server.port}")
        server.kill()
        time.sleep(PAUSE_SECONDS)
        server.start()
        self._wait_until_ready()

    def suspend_server(self, server):
        self._note(f"suspend server {server.port}")
        with suspended(server):
            time.sleep(SUSPENDED_SECONDS)
        self._wait_until_ready()

    def kill_store(self, store):
        self._note(f"kill -9 store {store.port}")
        begin = time.monotonic_ns()
        store.kill()
        time.sleep(PAUSE_SECONDS)
        store.start()
        self._is_whole()
        self._wait_until_ready()
        self.outages.append((begin, time.monotonic_ns()))
        self._note("the store is back")

    def _wait_until_ready(self):
        until = time.monotonic() + PATIENCE_SECONDS
        while not all(_is_ready(server) for server in self._servers):
            assert time.monotonic() < until, "a server does not become ready"
            time.sleep(0.01)

    def _note(self, what):
        self.log.append(f"{time.monotonic() - self._begin:6.2f} s  {what}")


@contextlib.contextmanager
def suspended(server):
    os.killpg(server._process.pid, signal.SIGSTOP)
    stand_still(server._process.pid)
    try:
        yield
    finally:
        os.killpg(server._process.pid, signal.SIGCONT)


def _is_ready(server):
    try:
        return AdminClient(server.url).is_ready()[0]
    except RemoteError:
        return False
