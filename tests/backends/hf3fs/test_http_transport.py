"""The loop thread of the HTTP metadata client."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import closing

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.client.loop_thread import LoopThread
from hicache_storage.objects import Call
from tests.backends.hf3fs.conftest import ANOTHER, MAIN
from tests.backends.hf3fs.listening import listening
from tests.backends.hf3fs.test_inline_loop import ABOUT

PATIENCE_SECONDS = 60.0


async def nothing():
    return None


@pytest.fixture
def thread():
    made = LoopThread("hicache-test-loop", end=nothing, after=lambda: None)
    yield made
    made.close()


@pytest.mark.parametrize(
    "ask", [LoopThread.post, lambda thread, work: thread.run(work, 1.0)], ids=["post", "run"]
)
@pytest.mark.parametrize("served", [False, True], ids=["never started", "has served"])
def test_a_closed_one_refuses_work_and_does_not_leave_it_lying(thread, ask, served):
    if served:
        thread.run(nothing(), PATIENCE_SECONDS)
    thread.close()
    work = nothing()
    with pytest.raises(MetadataError, match="closed"):
        ask(thread, work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_posted_work_runs(thread):
    done = threading.Event()

    async def work():
        await asyncio.sleep(0)
        done.set()

    thread.post(work())
    assert done.wait(PATIENCE_SECONDS)


def test_posted_work_that_fails_leaves_the_loop_serving(thread):
    async def fail():
        raise MetadataError("on purpose")

    async def answer():
        return 7

    thread.post(fail())
    assert thread.run(answer(), PATIENCE_SECONDS) == 7


def test_a_closed_client_is_not_warned_of_what_nobody_waits_for():
    client = HttpMetadataClient("http://127.0.0.1:1")
    client.close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(MetadataError, match="closed"):
            client.send_later("/v2/unpin", p.Unpin(pins=[1]))
        gc.collect()
    assert [str(warning.message) for warning in told] == []


@pytest.mark.parametrize("caller", [MAIN, ANOTHER], indirect=True)
def test_a_server_may_be_named(caller):
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
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


def test_a_thread_that_cannot_be_started_is_an_error_that_says_so(monkeypatch):
    start = threading.Thread.start

    def limited(self):
        if self.name == "hicache-metadata-client":
            raise RuntimeError("can't start new thread")
        start(self)

    with listening(ABOUT) as (url, _), closing(HttpMetadataClient(url)) as client:
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", limited)
        for _ in range(3):
            with pytest.raises(MetadataError, match="can't start new thread"):
                client.refresh(Call(PATIENCE_SECONDS))
            with pytest.raises(MetadataError, match="can't start new thread"):
                client.send_later("/v2/unpin", p.Unpin(pins=[1]))
            client.close()
            client = HttpMetadataClient(url)
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.undo()
        with closing(client):
            client.refresh(Call(PATIENCE_SECONDS))
