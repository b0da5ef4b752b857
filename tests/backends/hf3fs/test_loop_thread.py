"""The loop thread of the HTTP metadata client."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import warnings

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.client.loop_thread import LoopThread

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
