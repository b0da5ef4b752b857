"""The metadata client: long requests, and faulty servers."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client import failover
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.failover import ATTEMPTS
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.storage import group_commit
from hicache_storage.objects import Call
from hicache_storage.spec import StorageUnavailableError
from tests.backends.hf3fs.conftest import SERVE
from tests.backends.hf3fs.harness import ScopeClient
from tests.backends.hf3fs.listening import listening, reply
from tests.metadata_server.redis_servers import redis_server
from tests.support.metadata import Served
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=100)

PATIENCE_SECONDS = 60.0


def test_requests_are_split_and_responses_merged():
    limits = msgspec.structs.replace(DEFAULTS, keys=10, scopes=2)
    request = p.Lookup(
        scopes=[
            p.LookupScope(scope=f"0:s{n}", keys=[f"{n}-{i}" for i in range(size)])
            for n, size in enumerate((25, 0, 3))
        ]
    )
    sent = list[p.Lookup]()

    class Limited(HttpMetadataClient):
        about = p.About(
            protocol="2", server="", instance="", durability=p.StoreDurability.NONE, limits=limits
        )

        def send(self, path, request, response_type, call):
            if path == "/v2/initialize":
                return None
            sent.append(request)
            if path == "/v2/reserve":
                parts = [_leased(part.keys) for part in request.scopes]
                return p.Leases(scopes=parts, lease_seconds=next(seconds))
            return p.LookedUp(scopes=[_echo(part.keys) for part in request.scopes])

    with closing(Limited("http://127.0.0.1:1")) as client:
        for part in request.scopes:
            client.declare(p.ScopeGeometry(scope=part.scope, slots=100))
        found = client.lookup(request.scopes, Call(10))
        looked_up, seconds = len(sent), iter((9.0, 7.0, 8.0))
        wanted = p.ReserveScope(scope="0:s0", keys=request.scopes[0].keys)
        leased = client.reserve([wanted], Call(10), lease_seconds=9.0)
    assert (len(sent) - looked_up, leased.lease_seconds) == (3, 7.0), "the shortest"
    assert leased.scopes[0].leases == list(range(25))
    assert all(
        sum(len(part.keys) for part in piece.scopes) <= 10 and len(piece.scopes) <= 2
        for piece in sent
    )
    # The last keys are sent first, so that the head of a chain ends as the latest used.
    assert sent[0].scopes[-1].keys[-1] == "2-2"
    assert [part.slots for part in found] == [
        [int(key.split("-")[1]) for key in part.keys] for part in request.scopes
    ]


def _leased(keys):
    numbers = [int(key.split("-")[1]) for key in keys]
    states = [p.Reserved.LEASED] * len(keys)
    return p.Leased(states=states, slots=numbers, generations=numbers, leases=numbers)


def _echo(keys):
    numbers = [int(key.split("-")[1]) for key in keys]
    return p.FoundPages(slots=numbers, generations=numbers, lengths=numbers, checksums=numbers)


# Servers that misbehave.


BAD = {
    "500": reply(b"500 Oops", b"<html>no</html>", b"text/html"),
    "no msgpack": reply(b"200 OK", b"\xc1\xc1"),
    "another message": reply(b"200 OK", msgspec.msgpack.encode({"created": "yes"})),
    "another content type": reply(b"200 OK", b"hello", b"text/plain"),
    "redirect": reply(b"302 Found", b""),
    "closes": lambda connection: connection.shutdown(socket.SHUT_RDWR),
    "no http": lambda connection: connection.sendall(b"220 mail ready\r\n\r\n"),
    "torn": lambda connection: (
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc"),
        connection.shutdown(socket.SHUT_RDWR),
    ),
    "a body without an end": lambda connection: connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    ),
}


@pytest.mark.parametrize("manner", BAD)
def test_what_is_no_answer_is_an_error_and_is_asked_again_under_one_key(manner):
    geometry = p.ScopeGeometry(scope="0:kv-test", slots=16)
    with listening(BAD[manner]) as (url, requests), closing(HttpMetadataClient(url)) as client:
        with pytest.raises(StorageUnavailableError):
            client.send(
                "/v2/initialize",
                p.Initialize(scopes=[geometry]),
                p.Initialized,
                Call(PATIENCE_SECONDS),
            )
        keys = {
            line
            for data in requests
            for line in data.splitlines()
            if line.lower().startswith(b"idempotency-key")
        }
        assert len(requests) == ATTEMPTS
        assert len(keys) == 1


def test_an_answer_about_something_else_is_none(server):
    with closing(HttpMetadataClient(server.url)) as client:
        client.refresh(Call(10))
        scope, real = ScopeClient(client), client.send
        client.send = lambda path, request, kind, call: (
            p.LookedUp(scopes=[p.FoundPages(slots=[0], generations=[0], lengths=[], checksums=[0])])
            if path == "/v2/lookup"
            else real(path, request, kind, call)
        )
        with pytest.raises(MetadataError, match="another number"):
            scope.lookup()
        client.send = lambda path, request, kind, call: p.LookedUp(
            scopes=[p.FoundPages(slots=[16], generations=[1], lengths=[1], checksums=[0])]
        )
        with pytest.raises(MetadataError, match="outside"):
            scope.lookup()


def test_close_leaves_no_thread_and_ends_what_runs():
    before, over = set(threading.enumerate()), threading.Event()
    with (
        listening(lambda _: over.wait(2 * PATIENCE_SECONDS)) as (url, requests),
        ThreadPoolExecutor(1) as thread,
    ):
        client = HttpMetadataClient(url)
        asking = thread.submit(client.refresh, Call(2 * PATIENCE_SECONDS))
        eventually(lambda: requests)
        client.close()
        client.close()
        with pytest.raises(StorageUnavailableError):
            asking.result(PATIENCE_SECONDS)
        over.set()
        with pytest.raises(MetadataError, match="closed"):
            client.refresh(Call(1))
        with pytest.raises(MetadataError, match="closed"):
            client.send_later("/v2/abort", p.Abort(scopes=[]))
    started = {thread.name for thread in set(threading.enumerate()) - before}
    assert "hicache-metadata-client" not in started


def refusal(ask):
    """Why the server refuses; on a busy machine a reason may come later than clients wait."""
    try:
        ask()
    except MetadataError as error:
        return str(error) if str(error).endswith("(503 unavailable)") else ""
    return ""


def test_a_store_that_hangs_behind_a_server_is_the_reason_of_its_answer(tmp_path):
    """Clients took the server for silent, whose reason came later than they waited."""
    assert group_commit.PATIENCE_SECONDS < failover.MAX_ATTEMPT_SECONDS
    with redis_server(tmp_path, appendonly="yes", appendfsync="no") as redis:
        command = f"{SERVE.partition(' --store')[0]} --store {redis.url}"
        with Served(command=command) as server, closing(HttpMetadataClient(server.url)) as client:
            client.refresh(Call(PATIENCE_SECONDS))
            scope = ScopeClient(client)
            scope.store(["a"])
            redis.suspend()
            try:
                eventually(lambda: refusal(lambda: scope.reserve(["b"])))
                # From memory, until the server's lease has ended.
                reason = eventually(lambda: refusal(scope.lookup))
            finally:
                redis.resume()
            assert "redis" in reason
