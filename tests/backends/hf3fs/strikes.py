"""Servers that are killed and started again one after another, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from hicache_conformance.grounds.services import stand_still
from hicache_metadata_server.remote import Remote, RemoteError

PATIENCE_SECONDS = 60.0


class Strikes(threading.Thread):
    """Strikes every server in turn until its time is over, and once at least.

    Args:
        servers: metadata servers, on one store; there is always one that serves.
        stores: processes of the store, each of which takes all or a part of it away.
        seconds: after which no further round begins.
        pause_seconds: between a server's return and the next strike.
    """

    def __init__(self, servers, stores, *, seconds, pause_seconds=0.5):
        super().__init__(name="strikes")
        self._servers, self._stores = servers, stores
        self._seconds, self._pause = seconds, pause_seconds
        self.outages = list[tuple[int, int]]()
        """When the store was away: from its end until every server says that it is ready, by `time.monotonic_ns()`."""
        self.log = list[str]()
        self.over_at = 0
        self.error: BaseException | None = None
        self._begin = time.monotonic()

    def run(self):
        try:
            self._begin = time.monotonic()
            while not self.log or time.monotonic() - self._begin < self._seconds:
                for server in self._servers:
                    self._strike_server(server)
                for store in self._stores:
                    self._strike_store(store)
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self.error = error
        self.over_at = time.monotonic_ns()

    def finish(self):
        """Wait for the end; raise what went wrong."""
        self.join()
        if self.error is not None:
            raise self.error

    def _strike_server(self, server):
        time.sleep(self._pause)
        self._note(f"kill -9 {server.url}")
        server.kill()
        time.sleep(self._pause)
        server.start()
        self._wait_until_ready()
        time.sleep(self._pause)
        self._note(f"suspend {server.url}")
        with suspended(server):
            time.sleep(2 * self._pause)
        self._wait_until_ready()

    def _strike_store(self, store):
        time.sleep(self._pause)
        self._note(f"kill -9 store {store.port}")
        begin = time.monotonic_ns()
        store.kill()
        time.sleep(self._pause)
        store.start()
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
    stand_still(server._process)
    try:
        yield
    finally:
        os.killpg(server._process.pid, signal.SIGCONT)


def _is_ready(server):
    try:
        return Remote(server.url).is_ready()[0]
    except RemoteError:
        return False
