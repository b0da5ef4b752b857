"""An interrupt, as by Ctrl-C or a test's time limit, leaves no lock, thread or slot behind, wherever
it comes."""

from __future__ import annotations

import gc
import sys
import threading
from contextvars import copy_context
from pathlib import Path

import pytest

import hicache_storage
from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import Capabilities
from tests.support.waiting import eventually

SDK = str(Path(hicache_storage.__file__).parent)
PATIENCE_SECONDS = 20.0
"""Less than `close` waits for a call that is counted and does not run."""
CALLS = {
    "exists": lambda storage, transfers: storage.batch_exists_v2(["a"]),
    "get": lambda storage, transfers: storage.batch_get_v2(transfers),
    "set": lambda storage, transfers: storage.batch_set_v2(transfers),
    "delete": lambda storage, transfers: storage.delete(["a"]),
}


def is_interrupted(call, point):
    """Make a call, and interrupt it where Python may: at the `point`th beginning of a function of
    the SDK in this thread, or end of one in C. False if there are fewer.

    The call has a context of its own: a request id that it set may stay set, and later log lines of
    this thread would have it."""
    left = point

    def profile(frame, event, _):
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(SDK):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    # A finalizer of what an earlier test has left would get the interrupt, and nobody else.
    gc.disable()
    sys.setprofile(profile)
    try:
        copy_context().run(call)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return False


@pytest.mark.parametrize("may_hang", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_storage_serves_and_closes_after_an_interrupt(kit, name, may_hang):
    """`close` waited 30 s for a call that was counted still, and threads outlived it."""
    before, point = set(threading.enumerate()), 0
    while True:
        storage, pool = kit.memory_storage(
            capabilities=Capabilities(may_hang=may_hang, deletes=True)
        )
        layers = wrap(storage, StorageOptions(deadline_seconds=60.0))
        layers.register_mem_host_pool_v2(pool, "kv")
        layers.open()
        transfers = [pool.transfer("kv", ["a"], [0])]
        interrupted = is_interrupted(lambda: CALLS[name](layers, transfers), point)  # noqa: B023
        assert layers.batch_set_v2(transfers) == {"kv": [True]}, f"interrupted at {point}"
        closing = threading.Thread(target=layers.close)
        closing.start()
        closing.join(PATIENCE_SECONDS)
        assert storage.operations[-1] == "disconnect", f"interrupted at {point}"
        eventually(lambda: set(threading.enumerate()) <= before)
        if not interrupted:
            assert point
            return
        point += 1


@pytest.mark.parametrize("max_threads", [None, 1, 2])
def test_a_thread_pool_runs_and_closes_after_an_interrupt(max_threads):
    """A thread that was taken out of the idle ones and given nothing, or was starting, was lost."""
    before, interrupted, point = set(threading.enumerate()), True, 0
    while interrupted:
        pool, made = ThreadPool("interrupted", max_threads), []
        pool.submit(lambda: None).wait()
        interrupted = is_interrupted(lambda: pool.run([lambda: made.append(1)] * 3), point)  # noqa: B023
        finished = len(made)
        assert pool.submit(lambda: None).wait(PATIENCE_SECONDS), f"interrupted at {point}"
        assert interrupted or finished == 3
        assert len(made) == finished, f"a call after the end of `run`, interrupted at {point}"
        pool.close(PATIENCE_SECONDS)
        # One whose start was interrupted is not waited for.
        eventually(lambda: set(threading.enumerate()) <= before)
        point += 1
