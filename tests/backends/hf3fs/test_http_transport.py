"""Connections and threads of the HTTP metadata client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_storage.objects import Call
from hicache_storage.spec import StorageTimeoutError
from tests.backends.hf3fs.listening import listening, reply
from tests.support.waiting import eventually

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
PATIENCE_SECONDS = 60.0


def test_calls_at_the_same_time_are_all_answered():
    both = threading.Barrier(2, timeout=30)

    def answer(connection):
        # Only when two requests are on their way: that one waits for the other would be a deadline.
        both.wait()
        ABOUT(connection)

    with listening(answer) as (url, requests), closing(HttpMetadataClient(url)) as client:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(client.refresh, [Call(25), Call(25)]))
        assert len(requests) == 2


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used():
    """A server closes those that are idle; a client that did not look would take its request for
    failed, and the server for ill."""
    answered, closed = threading.Semaphore(0), threading.Semaphore(0)

    def answer(connection):
        reply(b"200 OK", msgspec.msgpack.encode(p.Cleared(pages=[3])))(connection)
        assert answered.acquire(timeout=30)
        connection.shutdown(socket.SHUT_RDWR)
        closed.release()

    with listening(answer) as (url, requests), closing(HttpMetadataClient(url)) as client:
        for count in range(1, 4):
            assert client.send(
                "/v2/clear", p.Clear(scopes=["0:kv"]), p.Cleared, Call(10)
            ).pages == [3]
            answered.release()
            assert closed.acquire(timeout=30)
            assert len(requests) == count


def test_a_connection_is_used_again():
    connections = set[int]()

    def answer(connection):
        connections.add(id(connection))
        ABOUT(connection)

    with listening(answer) as (url, _), closing(HttpMetadataClient(url)) as client:
        for _ in range(3):
            client.refresh(Call(PATIENCE_SECONDS))
    assert len(connections) == 1


def test_a_response_byte_by_byte_ends_at_the_deadline():
    """A time for each wait would let such a server keep a caller for ever."""
    over = threading.Event()

    def answer(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        while not over.wait(0.01):
            connection.sendall(b"x")

    with listening(answer) as (url, _), closing(HttpMetadataClient(url)) as client:
        try:
            with pytest.raises(StorageTimeoutError):
                client.refresh(Call(0.3))
        finally:
            over.set()


class Interrupt(BaseException):
    pass


def test_a_response_that_an_interrupt_has_cut_off_is_not_the_next_ones():
    """In the main thread a signal's handler may raise while a response is read."""
    first = threading.Event()

    def answer(connection):
        if first.is_set():
            ABOUT(connection)
            return
        first.set()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        os.kill(os.getpid(), signal.SIGALRM)

    def interrupt(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with listening(answer) as (url, _), closing(HttpMetadataClient(url)) as client:
            with pytest.raises(Interrupt):
                client.refresh(Call(PATIENCE_SECONDS))
            assert client.refresh(Call(PATIENCE_SECONDS)).instance == "1"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_server_may_be_named():
    with (
        listening(ABOUT) as (url, _),
        closing(HttpMetadataClient(url.replace("127.0.0.1", "localhost"))) as client,
    ):
        assert client.refresh(Call(PATIENCE_SECONDS)).instance == "1"
    with (
        closing(HttpMetadataClient("http://no-such-name.invalid:18000")) as client,
        pytest.raises(MetadataError, match="does not answer"),
    ):
        client.refresh(Call(PATIENCE_SECONDS))


def test_a_name_server_that_hangs_delays_neither_close_nor_the_end(tmp_path):
    """A loop that was being closed waited for libuv's lookup, and the process ended with SIGSEGV."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.98", 53))
        # A lookup takes 150 s.
        options = "options timeout:30 attempts:5"
        (tmp_path / "resolv.conf").write_text(f"nameserver 127.0.0.98\n{options}")
        mount = f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
        shell = f'mount --make-rprivate / && {mount} && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, "-c", UNRESOLVED]
        done = subprocess.run(
            [*command, str(tmp_path)], check=False, capture_output=True, text=True, timeout=60
        )
    assert (done.stdout, done.returncode) == ("unavailable\nclosed\n", 0), done.stderr


UNRESOLVED = """
import sys
from hicache_storage import StorageIdentity, StorageOptions, create_storage
from hicache_storage.spec import StorageUnavailableError
identity = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=16, layout="page_first")
url = "http://meta.example.test:18000"
config = {"path": sys.argv[1], "metadata_url": url}
storage = create_storage("hf3fs", identity, config, options=StorageOptions(deadline_seconds=1))
try:
    storage.open()
except StorageUnavailableError:
    print("unavailable")
storage.close()
print("closed", flush=True)
"""


def test_without_a_thread_requests_are_answered_and_what_nobody_waits_for_is_refused(monkeypatch):
    start = threading.Thread.start

    def limited(self):
        if self.name.startswith("hicache-"):
            raise RuntimeError("can't start new thread")
        start(self)

    with listening(ABOUT) as (url, _):
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", limited)
        for _ in range(3):
            with closing(HttpMetadataClient([url, "http://127.0.0.1:1"])) as client:
                # Also where one of the servers fails, which is probed in a thread.
                assert client.refresh(Call(PATIENCE_SECONDS)).instance == "1"
                with pytest.raises(MetadataError, match="can't start new thread"):
                    client.send_later("/v2/abort", p.Abort(scopes=[]))
        # Of a closed connection the server, which is in this process, learns a moment later.
        eventually(lambda: len(os.listdir("/proc/self/fd")) == before)
