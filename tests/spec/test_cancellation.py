"""Cancellation waits for shielded writes, and no write begins after it."""

from __future__ import annotations

import threading

from hicache_storage.spec import CancellationToken


def test_cancel_waits_for_a_shielded_block():
    token, written, cancelled = CancellationToken(), threading.Event(), threading.Event()

    def write():
        with token.shield() as active:
            assert active
            written.set()
            # Were the call cancelled without waiting, it would be by now.
            assert not cancelled.wait(0.1)

    def cancel():
        written.wait(60)
        token.cancel()
        cancelled.set()

    threads = [threading.Thread(target=target) for target in (write, cancel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cancelled.is_set()


def test_several_threads_shield_one_call():
    token = CancellationToken()
    with token.shield() as one, token.shield() as two:
        assert one
        assert two
    token.cancel()
