"""The inline event loop of the HTTP metadata client."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client import inline_loop
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.client.http_transport import HttpTransport
from hicache_metadata_server.client.inline_loop import InlineLoop
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_storage.objects import Call
from tests.backends.hf3fs.conftest import ANOTHER
from tests.backends.hf3fs.listening import listening, reply

ABOUT = reply(
    b"200 OK",
    msgspec.msgpack.encode(
        p.About(
            protocol=p.PROTOCOL,
            server="test 0",
            instance="1",
            durability=p.StoreDurability.PROCESS,
            limits=DEFAULTS,
        )
    ),
)
elsewhere = pytest.mark.parametrize("caller", [ANOTHER], indirect=True)


def refuse_work(client, monkeypatch):
    """Whatever the client's thread is asked fails."""

    def refuse(work, seconds):
        work.close()
        raise AssertionError("the client's thread was asked")

    monkeypatch.setattr(client._loop_thread, "run", refuse)


@pytest.fixture
def loop():
    made = InlineLoop(HttpTransport(None))
    yield made
    closer = threading.Thread(target=made.close, args=(5.0,))
    closer.start()
    closer.join()


def test_the_main_thread_never_runs_it(loop):
    assert not loop.try_acquire()


@elsewhere
def test_a_thread_that_runs_a_loop_does_not_run_another(caller, loop):
    async def ask():
        return loop.try_acquire()

    # Not an asynchronous test: those run in the main thread, which is refused for that.
    assert not asyncio.run(ask())


@elsewhere
def test_one_thread_at_a_time_runs_it(caller, loop):
    assert loop.try_acquire()
    others = []
    other = threading.Thread(target=lambda: others.append(loop.try_acquire()))
    other.start()
    other.join()

    async def answer(transport):
        return 7

    assert (others, loop.run(answer)) == ([False], 7)
    assert loop.try_acquire()
    loop.run(answer)


@elsewhere
def test_work_that_does_not_end_is_cancelled(caller, loop):
    begun, ended = threading.Event(), threading.Event()

    async def wait(transport):
        begun.set()
        await asyncio.sleep(60)

    def work():
        assert loop.try_acquire()
        with pytest.raises(asyncio.CancelledError):
            loop.run(wait)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(30)
    loop.close(0.0)
    assert ended.wait(30)
    assert not loop.try_acquire()


@elsewhere
def test_a_call_of_a_healthy_server_needs_no_other_thread(caller, monkeypatch):
    with listening(ABOUT) as (url, requests), closing(HttpMetadataClient(url)) as client:
        refuse_work(client, monkeypatch)
        for _ in range(3):
            client.refresh(Call(10))
        assert len(requests) == 3


def test_calls_at_the_same_time_are_all_answered():
    both = threading.Barrier(2, timeout=30)

    def answer(connection):
        # Only when two requests are on their way: that one waits for the other would be a deadline.
        both.wait()
        ABOUT(connection)

    with listening(answer) as (url, requests), closing(HttpMetadataClient(url)) as client:
        asking = [threading.Thread(target=client.refresh, args=(Call(25),)) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert len(requests) == 2


@elsewhere
def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used(caller, monkeypatch):
    """A server closes those that are idle; a client that did not look would take its request for
    failed, and the server for ill."""
    monkeypatch.setattr(inline_loop, "IDLE_SECONDS", 0.0)
    answered, closed = threading.Semaphore(0), threading.Semaphore(0)

    def answer(connection):
        # A field of a later server is ignored.
        reply(b"200 OK", msgspec.msgpack.encode({"pages": [3], "new": True}))(connection)
        assert answered.acquire(timeout=30)
        connection.shutdown(socket.SHUT_RDWR)
        closed.release()

    with listening(answer) as (url, requests), closing(HttpMetadataClient(url)) as client:
        refuse_work(client, monkeypatch)
        for count in range(1, 4):
            # aiohttp itself would ask again for a GET.
            assert client.send(
                "/v2/clear", p.Clear(scopes=["0:kv"]), p.Cleared, Call(10)
            ).pages == [3]
            answered.release()
            assert closed.acquire(timeout=30)
            assert len(requests) == count


@elsewhere
def test_a_client_that_is_closed_says_so(caller):
    with listening(ABOUT) as (url, _):
        client = HttpMetadataClient(url)
        client.refresh(Call(10))
        client.close()
        with pytest.raises(MetadataError, match="closed"):
            client.refresh(Call(10))
