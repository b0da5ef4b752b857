"""The thread of an engine that calls a foreign driver: turns, deadlines, and calls that fail."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_conformance.interfaces.presence_storage import EngineThread
from hicache_conformance.model.case import Violation


@pytest.fixture
def made():
    threads = []

    def make(**options):
        threads.append(EngineThread("engine", **options))
        return threads[-1]

    yield make
    for thread in threads:
        thread.close()


def test_calls_of_several_threads_are_under_way_at_a_time_and_made_in_one(made):
    arrived, callers = list[int](), set[str]()

    def steps():
        arrived.append(1)
        callers.add(threading.current_thread().name)
        # Never true, if the first call had to end before the second begins.
        while len(arrived) < 2:
            yield "the other call"
        return len(arrived)

    engine = made()
    answers = list[int]()
    others = [
        threading.Thread(target=lambda: answers.append(engine.run(steps()))) for _ in range(2)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert answers == [2, 2]
    assert callers == {"engine"}


def test_what_is_never_reported_is_a_violation(made):
    def steps():
        while True:
            yield "a load of 3 chunks was not reported"

    with pytest.raises(
        Violation, match=r"a load of 3 chunks was not reported for 0\.05 s"
    ) as found:
        made().run(steps(), patience=0.05)
    assert found.value.rule == "FT-3"


def test_a_driver_that_keeps_the_thread_is_told_apart(made):
    freed = threading.Event()
    with pytest.raises(Violation, match="keeps the engine's thread"):
        made().do(freed.wait, patience=0.05)
    freed.set()


def test_what_a_call_raises_is_raised_to_its_caller_alone(made):
    engine = made()

    def fails():
        raise OSError("no such store")

    with pytest.raises(OSError, match="no such store"):
        engine.do(fails)
    assert engine.do(lambda: 7) == 7


def test_what_is_raised_between_turns_ends_the_calls_that_wait(made):
    def end_turn():
        raise RuntimeError("job 5 was reported twice")

    def steps():
        while True:
            yield "nothing"

    with pytest.raises(RuntimeError, match="job 5"):
        made(end_turn=end_turn).run(steps())


def test_a_thread_that_has_ended_takes_no_calls(made):
    engine = made()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine has ended"):
        engine.do(time.monotonic)
