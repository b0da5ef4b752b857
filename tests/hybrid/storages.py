"""Storages to fill, to break and to let hang, and prefetches from them."""

from __future__ import annotations

import threading
from itertools import takewhile

from hicache_storage.spec import PoolTransfer, PoolTransferResult, StorageClosedError
from tests.hybrid.stack import Stack, hashes, identity
from tests.support.waiting import eventually


class Gate:
    """Lets calls of a storage hang until it is opened."""

    def __init__(self, *operations):
        self._operations = operations
        self._open = threading.Event()
        self.entered = threading.Event()
        self.hanging = 0
        """Calls that have hung."""

    @property
    def holds(self):
        """Whether a call hangs now."""
        return self.entered.is_set() and not self._open.is_set()

    def __call__(self, operation):
        if operation in self._operations and not self._open.is_set():
            self.hanging += 1
            self.entered.set()
            assert self._open.wait(60)

    def open(self):
        self._open.set()


class Store:
    def __init__(self, kit):
        self.kit, self.objects = kit, {}

    def open(self, **changes):
        """Another storage over the same objects."""
        storage = self.kit.storage(identity(**changes), self.objects)
        self.kit.opened.append(storage)
        return storage

    def fill(self, pages, ends=()):
        """Store a chain of pages with states at some endpoints, through a stack of its own; its
        keys."""
        stack, keys = Stack(pages=pages, states=max(1, len(ends))), hashes(pages)
        host = stack.take("host", pages, ends)
        stack.fill("host", host, keys)
        stack.controller.attach(self.open())
        stack.controller.backups.begin(host, keys)
        [result] = eventually(stack.controller.backups.completed)
        assert result.complete
        stack.close()
        return keys


class Faulty:
    """A storage of which one call raises, has a fixed answer, or is made by a function of the real
    call and its arguments."""

    def __init__(self, inner, name, answer):
        self.inner, self._name, self._answer = inner, name, answer
        self.calls = []
        """The first argument of each such call."""

    def __getattr__(self, name):
        real = getattr(self.inner, name)
        if name != self._name:
            return real

        def call(*arguments):
            self.calls.extend(arguments[:1])
            if isinstance(self._answer, BaseException):
                raise self._answer
            return self._answer(real, *arguments) if callable(self._answer) else self._answer

        return call

    def stored(self):
        """The keys of each call that stores, by pool."""
        return [{each.name: list(each.keys) for each in transfers} for transfers in self.calls]


def of(change):
    """An answer that is changed."""
    return lambda real, *arguments: change(real(*arguments))


def keeping(keeps):
    """A `batch_set_v2` that stores and reports the pages of which `keeps(pool, key)` holds."""

    def call(real, transfers, info):
        answer, kept = {}, []
        for transfer in transfers:
            rows = transfer.host_indices.view(len(transfer.keys), -1)
            answer[transfer.name] = [keeps(transfer.name, key) for key in transfer.keys]
            chosen = [number for number, keep in enumerate(answer[transfer.name]) if keep]
            keys = [transfer.keys[number] for number in chosen]
            kept.append(PoolTransfer(transfer.name, rows[chosen].view(-1), keys=keys))
        real(kept, info)
        return answer

    return call


def without(lost):
    """A `batch_exists_v2` that finds all pages but the lost ones."""

    def call(real, keys, transfers, info):
        there = list(takewhile(lambda key: key not in lost, keys))
        return PoolTransferResult(len(there), {}, list(range(1, len(there) + 1)))

    return call


def ready(stack, operation):
    """Whether the request of a prefetch may go on, after a step of all prefetches."""
    stack.controller.prefetcher.advance()
    return operation.ready


def finished(stack, operation):
    """The result of a prefetch once it is done."""
    eventually(lambda: ready(stack, operation) and operation.done)
    return stack.controller.prefetcher.terminate(operation)


def fetched(stack, pages, **options):
    """The result of a prefetch of so many pages."""
    return finished(stack, stack.controller.prefetcher.begin("r", hashes(pages), **options))


def is_closed(storage):
    """Whether a storage refuses calls."""
    try:
        storage.batch_exists_v2([])
    except StorageClosedError:
        return True
    return False
