"""A caller leaves when nobody writes to its memory, and nobody writes when it has left."""

from __future__ import annotations

import threading

from hicache_storage.spec import Caller


def test_a_caller_waits_until_it_leaves():
    caller = Caller()
    with caller as waits:
        assert waits
    assert not caller.gone
    caller.leave()
    assert caller.gone
    with caller as waits:
        assert not waits


def test_a_caller_does_not_leave_while_its_memory_is_written():
    caller, written, left = Caller(), threading.Event(), threading.Event()

    def write():
        with caller as waits:
            assert waits
            written.set()
            # Were the caller able to leave now, it would have.
            assert not left.wait(0.1)

    def leave():
        written.wait(60)
        caller.leave()
        left.set()

    threads = [threading.Thread(target=target) for target in (write, leave)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert left.is_set()


def test_several_threads_write_for_one_caller():
    caller = Caller()
    with caller as one, caller as two:
        assert one
        assert two
    caller.leave()
