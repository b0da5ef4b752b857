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
from hicache_metadata_server.client.splitting import joined
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.storage import group_commit
from hicache_storage.objects import Call
from hicache_storage.spec import StorageUnavailableError
from tests.backends.hf3fs.conftest import SERVE
from tests.backends.hf3fs.harness import ScopeClient, interrupted
from tests.backends.hf3fs.listening import listening, reply
from tests.metadata_server.redis_servers import redis_server
from tests.support.metadata import Served
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=100)

PATIENCE_SECONDS = 60.0


def test_requests_are_split_and_responses_merged(kept_server, monkeypatch):
    with closing(HttpMetadataClient(kept_server.url)) as client:
        client.refresh(Call(PATIENCE_SECONDS))
        limits = msgspec.structs.replace(DEFAULTS, keys=5, scopes=2)
        about = msgspec.structs.replace(client.about, limits=limits)
        monkeypatch.setattr(client, "_about", about)
        asked = list[p.LookupScope]()
        for number, size in enumerate((12, 0, 3)):
            keys = [f"{number}-{key}" for key in range(size)]
            asked.append(p.LookupScope(scope=f"{number}:kv-split", keys=keys))
            # By several requests, too.
            ScopeClient(client, asked[-1].scope).store(keys)
        with interrupted(client, "send") as sent:
            found = client.lookup(asked, Call(PATIENCE_SECONDS))
        pieces = [request.scopes for _, request, *_ in sent]
        assert all(
            len(piece) <= 2 and sum(len(part.keys) for part in piece) <= 5 for piece in pieces
        )
        # The last keys are sent first, so that the head of a chain ends as the latest used.
        assert pieces[0][-1].keys[-1] == "2-2"
        monkeypatch.undo()
        assert found == client.lookup(asked, Call(PATIENCE_SECONDS))
        assert [len(set(part.slots) - {-1}) for part in found] == [12, 0, 3]


def test_the_shortest_of_several_leases_is_that_of_the_call():
    leased = p.Leased(states=[], slots=[], generations=[], leases=[])
    done = [
        (0, p.Reserve(scopes=[]), p.Leases(scopes=[leased], lease_seconds=n)) for n in (9, 7, 8)
    ]
    assert joined(done).lease_seconds == 7


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
