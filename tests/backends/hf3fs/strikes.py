"""Servers that are killed and started again one after another."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import AdminClient
from hicache_metadata_server.client.failover import FIRST_BACKOFF_SECONDS
from tests.backends.hf3fs.forwards import Manner
from tests.support.metadata import HttpClient, Refused, Unanswered
from tests.support.waiting import eventually

PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 0.4
"""Between strikes on the average, and until what was killed is started again."""
SUSPENDED_SECONDS = 1.0
BACKOFF_SECONDS = 2 * FIRST_BACKOFF_SECONDS
"""After which a client asks a server again that was silent, and its probe is answered."""
LEASE_SECONDS = 3.0
"""Of the ownership of scopes: `shared.ownership.LEASE_SECONDS`."""


class Strikes:
    """Strikes one after another until its time is over, and each of them once at least.

    Args:
        servers: metadata servers on one store.
        is_whole: waits until the store has come back.
        seconds: after which no further round begins.
    """

    def __init__(self, servers, is_whole, *, seconds):
        self._servers, self._is_whole, self._seconds = servers, is_whole, seconds
        self.plan = list[Callable[[], None]]()
        """What is to be done in a round; methods of this one."""
        self.outages = list[tuple[int, int]]()
        """When scopes may not have been served, by `time.monotonic_ns()`."""
        self.log = list[str]()
        self.over_at = 0
        """When they were over, by `time.monotonic_ns()`; 0 before."""
        self._random = random.Random(1)
        self._begin = time.monotonic()

    def run(self):
        """Strike; raise what went wrong."""
        try:
            self._begin = time.monotonic()
            while not self.log or time.monotonic() - self._begin < self._seconds:
                for strike in self.plan:
                    time.sleep(self._random.uniform(0.0, 2 * PAUSE_SECONDS))
                    strike()
        finally:
            self.over_at = time.monotonic_ns()

    def kill_server(self, server):
        is_alone = self._servers == [server]
        with self._outage(f"kill -9 server {server.port}", until_ready=is_alone):
            server.kill()
            if is_alone:
                server.start()
        if not is_alone:
            time.sleep(PAUSE_SECONDS)
            server.start()
            self._wait_until_ready()

    def stop_server(self, server):
        """Its scopes are handed over at once, but a request may meet the moment."""
        with self._outage(f"stop server {server.port}", until_ready=False):
            os.killpg(server.process.pid, signal.SIGTERM)
            eventually(lambda: server.process.poll() is not None, "a server does not stop")
            server.kill()
        server.start()
        self._wait_until_ready()

    def suspend_server(self, server, seconds=SUSPENDED_SECONDS):
        begin = time.monotonic()
        with self._outage(f"suspend server {server.port} for {seconds} s"), server.suspended():
            if seconds > 2 * LEASE_SECONDS:
                # Its scopes are others' meanwhile.
                self._wait_until_served([one for one in self._servers if one is not server])
                self._note(f"it is suspended; all is served after {time.monotonic() - begin:.2f} s")
            time.sleep(max(0.0, seconds - (time.monotonic() - begin)))

    def cut_network(self, server, cut, seconds):
        """Between a server and its store; what is sent meanwhile arrives afterwards."""
        with self._outage(f"cut the store off from server {server.port} for {seconds} s"):
            cut.manner = Manner.HANGS
            time.sleep(seconds)
            cut.manner = Manner.WELL

    def promote_replica(self, nodes):
        """Kill the primary; the Sentinels promote its replica, which the killed one then follows."""
        primary = next(node for node in nodes if _role(node) == "master")
        [replica] = [node for node in nodes if node is not primary]
        with self._outage(f"kill -9 primary {primary.port}"):
            primary.kill()
            eventually(lambda: _role(replica) == "master", "the replica is not promoted")
            primary.start()
            primary.follow(replica)

    def kill_store(self, store):
        with self._outage(f"kill -9 store {store.port}"):
            store.kill()
            time.sleep(PAUSE_SECONDS)
            store.start()
            self._is_whole()

    @contextlib.contextmanager
    def _outage(self, what, *, until_ready=True):
        """What is struck in the block is away until every scope is served again, and every server
        takes changes."""
        begin = time.monotonic_ns()
        yield
        self._wait_until_served(self._servers)
        seconds = (time.monotonic_ns() - begin) / 1e9
        if until_ready:
            self._wait_until_ready()
            # A lease may have ended since: a scope that was served then has no owner for a moment.
            self._wait_until_served(self._servers)
            seconds = (time.monotonic_ns() - begin) / 1e9
        time.sleep(BACKOFF_SECONDS)
        self.outages.append((begin, time.monotonic_ns()))
        self._note(f"{what}; all is served again after {seconds:.2f} s")

    def _wait_until_served(self, servers):
        """Wait until each scope is served, by whichever server, as some servers know it."""
        eventually(lambda: any(map(_serves_all, servers)), "a scope is not served")

    def _wait_until_ready(self):
        eventually(lambda: all(map(_is_ready, self._servers)), "a server does not become ready")

    def _note(self, what):
        self.log.append(f"{time.monotonic() - self._begin:6.2f} s  {what}")


def _role(node):
    with node.client() as client:
        return client.info("replication")["role"]


def _serves_all(server):
    client = HttpClient(server.url, answer_seconds=1.0)
    with contextlib.suppress(Unanswered, Refused):
        for scope in client.call("/v2/scopes", None, p.Scopes).scopes:
            part = p.LookupScope(scope=scope.scope, keys=["none"])
            client.call("/v2/lookup", p.Lookup(scopes=[part], touch=False), p.LookedUp)
        return True
    return False


def _is_ready(server):
    return not AdminClient(server.url).problem()
