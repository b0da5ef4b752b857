"""Chunks that a writer sends, and pages that do not arrive."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext

import pytest

from hicache_backends.mooncake import stores, writer
from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.writer import CHUNK_BYTES, PageWriter
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import Call, Namespace, ObjectWrite
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import (
    PageGeometry,
    PoolName,
    StorageTimeoutError,
    StorageUnavailableError,
)
from tests.backends.file.harness import content, identity
from tests.support.waiting import eventually


class Scripted:
    """Stands for a connection on which nothing is stored yet; keeps what is sent."""

    def __init__(self, arrives=lambda name: True):
        self.arrives, self.chunks, self.objects = arrives, [], {}
        self.published, self.revoked, self.has_failed_lately = [], [], False

    def revoke_pending(self):
        pass

    def begin(self, names, sizes, config):
        return [0] * len(names)

    def transfer(self, names, addresses, sizes, offsets):
        self.chunks.append(list(names))
        for name, *places in zip(names, addresses, sizes, offsets, strict=True):
            parts = list(zip(*places, strict=True))
            self.objects[name] = b"".join(
                ctypes.string_at(address, size) for address, size, _ in parts
            )
            assert [offset for *_, offset in parts] == [
                sum(size for _, size, _ in parts[:at]) for at in range(len(parts))
            ]
        return [self.arrives(name) for name in names]

    def note_failed_set(self):
        self.has_failed_lately = True

    def publish(self, names):
        self.published += names
        return [True] * len(names)

    def revoke(self, names):
        self.revoked += names


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    monkeypatch.setattr(library, "replicate_config", lambda copies: None)


def made(thread_pool, gathers=True):
    return PageWriter(
        Buffers(CHUNK_BYTES),
        1,
        0.0,
        thread_pool,
        nullcontext(),
        gathers=gathers,
    )


def writes(count, *components):
    space = Namespace(
        identity(), PoolName("kv"), PageGeometry("page_first", "bfloat16", 4, 4 * count, components)
    )
    for number in range(count):
        parts = [
            memoryview(bytearray(content(f"{number} {part}", 0, size)))
            for part, size in enumerate(components)
        ]
        yield ObjectWrite(space, f"key{number}", parts)


@pytest.mark.parametrize("gathers", [True, False])
def test_chunks(alone, gathers, monkeypatch):
    """Small pages a few at a time, of large ones a share for each thread, and all of them together
    where nothing is gathered; nothing is lost of any."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 300_000)
    small, large = list(writes(5, 60_000, 40_000)), list(writes(5, 200_000, 100_000))
    some, others, connection = names_of(small), names_of(large), Scripted()
    assert made(alone, gathers).write(connection, [*large, *small], Call()).stored == {
        *small,
        *large,
    }
    every = [*others, *some]
    chunks = [others[:2], others[2:4], others[4:], some[:2], some[2:4], some[4:]]
    assert connection.chunks == (chunks if gathers else [every])
    assert connection.objects == {
        name: one.tobytes() for name, one in zip(every, [*large, *small], strict=True)
    }
    assert connection.revoked == []


def test_threads_send_from_memory_of_their_own():
    together, sent = threading.Barrier(4), list(writes(60, 60_000, 40_000))

    class Both(Scripted):
        def transfer(self, *asked):
            together.wait(60)
            answer = super().transfer(*asked)
            # None puts anything else there before the other has looked.
            together.wait(60)
            return answer

    thread_pool, connection = ThreadPool("hicache-test", 4), Both()
    assert made(thread_pool).write(connection, sent, Call()).stored == set(sent)
    assert connection.objects == {
        name: one.tobytes() for name, one in zip(names_of(sent), sent, strict=True)
    }
    thread_pool.close(60)


def test_a_transfer_that_hangs_is_left(monkeypatch):
    """What has arrived is published, what has not been sent is revoked, and what hangs is revoked
    when it ends."""
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(stores, "MAX_THREADS", 2)
    monkeypatch.setattr(writer, "CHUNK_BYTES", 100_000)
    sent, go_on = list(writes(5, 60_000, 30_000)), threading.Event()
    names = names_of(sent)

    class Hanging(Scripted):
        def transfer(self, asked, *rest):
            if names[1] in asked:
                go_on.wait(60)
            return super().transfer(asked, *rest)

    thread_pool, connection = ThreadPool("hicache-test", 4, 4), Hanging()
    outcome = made(thread_pool).write(connection, sent, Call())
    assert outcome.stored == {sent[0], *sent[2:]}
    assert connection.revoked == []
    assert [type(fault) for fault in outcome.faults] == [StorageTimeoutError]
    assert connection.has_failed_lately
    go_on.set()
    eventually(lambda: not thread_pool.hung)
    assert connection.revoked == [names[1]]
    assert names[1] not in connection.published


def test_where_a_store_is_known_to_fail(alone):
    """Objects are sent one by one: one that does not arrive takes no others along."""
    sent = list(writes(3, 100, 100))
    names = names_of(sent)
    connection = Scripted(lambda name: name != names[1])
    connection.has_failed_lately = True
    outcome = made(alone).write(connection, sent, Call())
    assert connection.chunks == [[name] for name in names]
    assert outcome.stored == {sent[0], sent[2]}
    assert len(outcome.faults) == 1


@pytest.mark.parametrize(("most", "shares"), [(4 << 20, [2, 2, 2, 2]), (400_000, [1] * 8)])
def test_a_share_for_each_thread(alone, monkeypatch, most, shares):
    """Unless a chunk would be longer than that."""
    monkeypatch.setattr(writer, "MAX_CHUNK_BYTES", most)
    connection = Scripted()
    sent = list(writes(8, 200_000, 100_000))
    assert made(alone).write(connection, sent, Call()).stored == set(sent)
    assert [len(chunk) for chunk in connection.chunks] == shares


def test_an_error_gives_everything_up(alone, monkeypatch):
    monkeypatch.setattr(writer, "CHUNK_BYTES", 100_000)
    sent = list(writes(3, 60_000, 30_000))
    names = names_of(sent)

    def arrives(name):
        if name == names[1]:
            raise StorageUnavailableError("no connection")
        return True

    connection = Scripted(arrives)
    with pytest.raises(StorageUnavailableError):
        made(alone).write(connection, sent, Call())
    assert connection.published == []
    assert connection.revoked == names
