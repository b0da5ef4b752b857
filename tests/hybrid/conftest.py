"""Stacks that are closed at the end, and storages to break."""

from __future__ import annotations

import threading

import pytest

from hicache_storage.hybrid import page_hashes
from hicache_storage.hybrid.storage_io import backups
from hicache_storage.hybrid.storage_io.workers import Job
from tests.hybrid.stack import PAGE, Stack, identity, tokens


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(backups, "RETRY_SECONDS", 0.001)


@pytest.fixture
def make_stack():
    made = []

    def make(**options):
        made.append(Stack(**options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()
        assert not stack.simulator.races


@pytest.fixture
def stack(make_stack):
    return make_stack()


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


@pytest.fixture
def gate():
    """Makes a gate that a storage's `before` can be."""
    made = []

    def make(*operations):
        made.append(Gate(*operations))
        return made[-1]

    yield make
    for one in made:
        one.open()


@pytest.fixture
def impatient(monkeypatch):
    """Lets calls be overdue while a gate holds one, however fast or slow the machine is."""

    def make(gate):
        monkeypatch.setattr(Job, "overdue", lambda job, seconds: not job.query() and gate.holds)

    return make


@pytest.fixture
def store(kit):
    """Makes storages over the same objects, and fills them."""
    return Store(kit)


class Store:
    def __init__(self, kit):
        self.kit, self.objects = kit, {}

    def open(self, **changes):
        """Another storage over the same objects."""
        storage = self.kit.storage(identity(**changes), self.objects)
        self.kit.opened.append(storage)
        return storage

    def fill(self, pages, ends=(), *, seed=0, stack=None):
        """Store a chain of pages with states at some endpoints, through a stack of its own; its
        tokens and keys."""
        own = stack is None
        stack = stack or Stack(pages=pages, states=max(1, len(ends)))
        keys = page_hashes(tokens(pages, seed), PAGE)
        host = stack.take("host", pages, ends)
        stack.fill("host", host, keys)
        stack.controller.attach(self.open())
        stack.controller.write_storage(host, keys)
        result = None
        while result is None:
            result = next(iter(stack.controller.completed_backups()), None)
        assert result.complete
        if own:
            stack.close()
        else:
            stack.controller.free_host(host)
        return tokens(pages, seed), keys
