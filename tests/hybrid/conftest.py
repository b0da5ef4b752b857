"""Stacks that are closed at the end, and storages to break."""

from __future__ import annotations

import pytest

from hicache_storage.hybrid.storage_io import backups
from hicache_storage.hybrid.storage_io.workers import Job
from tests.hybrid.stack import Stack
from tests.hybrid.storages import Gate, Store


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
