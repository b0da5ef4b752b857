"""Faults of a store that are no violations of its driver: slow restarts, single failed calls."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hicache_conformance.cases import random_calls
from hicache_conformance.fixtures import fault_calls, process_group
from hicache_conformance.fixtures.fault_calls import wait_until_serving
from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.model.case import Violation

ALLOWED = 0.05


class Client:
    """Stands for a storage under test: it serves from its call number `from_call` on."""

    identity = None

    def __init__(self, from_call):
        self.from_call, self.calls = from_call, 0

    def set(self, keys):
        self.calls += 1
        return [self.calls > self.from_call]

    def get(self, keys):
        return [b"page"]

    def check_right(self, keys, found, *, when):
        assert found == [b"page"] * len(keys)

    def has(self, key):
        return True


def observers(client, *served):
    """The processes that watch a store, in turn."""
    left = list(served)

    class Group:
        def __init__(self, context, identity):
            # The last one again and again.
            self.served = left.pop(0) if len(left) > 1 else left[0]

        def worker(self, name, options):
            if self.served is None:
                raise Violation("LC-1", "nobody listens")
            if self.served == "then the storage":
                client.from_call = client.calls
            return self

        def set(self, keys, value):
            return [bool(self.served)]

        def get(self, keys):
            return [1]

        def close(self):
            pass

    return Group


@pytest.mark.parametrize(
    ("from_call", "served", "judged"),
    [
        (0, [True], nullcontext()),
        (10**9, [True], pytest.raises(Violation, match="FT-4: 0 s and")),
        # The store itself is not back in time, and then the storage is.
        (4, [False, None], nullcontext()),
        # The store came back after the storage's try, and before that of another process.
        (10**9, [None, "then the storage"], nullcontext()),
        # A fault after which nobody is ever served.
        (10**9, [False], pytest.raises(Violation, match="FT-4: 0 s and")),
    ],
    ids=["at once", "others only", "a slow store", "a store that is back between", "nobody"],
)
def test_a_store_that_serves_nobody_is_waited_for(monkeypatch, from_call, served, judged):
    client = Client(from_call)
    monkeypatch.setattr(fault_calls, "ProcessGroup", observers(client, *served))
    profile = SimpleNamespace(recovery_seconds=ALLOWED)
    context = SimpleNamespace(profile=profile, keys=lambda count: ["key"] * count)
    with judged:
        wait_until_serving(context, client, "a killed server")


class Worker:
    """Stands for a worker process whose gets answer in turn: pages, and faults met."""

    name = "reader"

    def __init__(self, *answers):
        self.answers, self.swallowed = list(answers), 0

    def get(self, keys, pool):
        value, faults = self.answers.pop(0)
        self.swallowed += faults
        return [value]


@pytest.mark.parametrize(
    ("answers", "judged"),
    [
        ([(None, 1), (7, 0)], nullcontext()),
        ([(None, 1)] * 3, pytest.raises(Violation, match=r"ID-2: .* answers False")),
        ([(None, 0)], pytest.raises(Violation, match=r"ID-2: .* answers False")),
        ([(None, 1), (None, 0)], pytest.raises(Violation, match=r"ID-2: .* answers False")),
    ],
    ids=["once", "each time", "no fault", "a fault, and then none"],
)
def test_a_get_that_met_a_fault_is_repeated(monkeypatch, answers, judged):
    monkeypatch.setattr(process_group, "STORE_PAUSE_SECONDS", 0)
    worker = Worker(*answers)
    with judged:
        ProcessGroup(SimpleNamespace(identity=lambda: None)).expect(worker, ["key"], 7, "ID-2")
    assert not worker.answers


class Refusing:
    """Stands for a storage under test whose sets are refused, some for a fault that it counts."""

    def __init__(self, refusals):
        self.refusals, self.faults, self.storage = list(refusals), 0, self

    def fault_count(self):
        return self.faults

    def store(self, keys, pool, *, generation):
        if self.refusals:
            self.faults += self.refusals.pop(0)
            raise Violation("SET-1", "refused")


@pytest.mark.parametrize(
    ("faults", "judged"),
    [
        ([1, 1], nullcontext()),
        ([1, 1, 1], pytest.raises(Violation, match="SET-1")),
        ([0], pytest.raises(Violation, match="SET-1")),
        ([1, 0], pytest.raises(Violation, match="SET-1")),
    ],
    ids=["twice", "each time", "no fault", "a fault, and then none"],
)
def test_a_set_that_met_a_fault_in_a_history_is_repeated(monkeypatch, faults, judged):
    monkeypatch.setattr(random_calls, "STORE_PAUSE_SECONDS", 0)
    storage = Refusing(faults)
    machine = SimpleNamespace(
        stored={},
        _pool=lambda pool: "kv",
        _chain=lambda places: ["key"],
        _speaker=lambda speaker: storage,
    )
    with judged:
        random_calls._StateMachine.set(machine, pool=0, places=[0], generation=1, speaker=0)
        assert machine.stored == {("kv", "key"): 1}


@pytest.mark.parametrize("failing", range(57, 72, 2))
def test_a_failure_that_does_not_come_again_is_a_failure_all_the_same(monkeypatch, failing):
    class Once(RuleBasedStateMachine):
        calls = 0

        def __init__(self, context, pools):
            super().__init__()

        @rule(number=st.integers(0, 1))
        def step(self, number):
            Once.calls += 1
            if Once.calls == failing:
                raise Violation("SET-1", "refused")

    monkeypatch.setattr(random_calls, "_StateMachine", Once)
    profile = SimpleNamespace(shrinks=True, histories=30, steps=4)
    context = SimpleNamespace(profile=profile, number=lambda name: 7)
    with pytest.raises(Violation, match="SET-1: refused") as found:
        random_calls.check_histories(context, ["kv"])
    assert any("passed when it was tried again" in note for note in found.value.__notes__)
