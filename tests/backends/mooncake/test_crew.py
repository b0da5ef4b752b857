"""Work on large pages in several threads."""

from __future__ import annotations

import os
import threading

import pytest

from hicache_backends.mooncake import crew
from hicache_backends.mooncake.crew import LEAST_BYTES, Crew


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.fixture
def three():
    made = Crew()
    yield made
    made.close()


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (1, 1), (2, 2), (3, 3), (7, 3)])
def test_results_are_in_order_and_large_items_are_shared(three, count, parts):
    items = list(range(count))
    results = three.share(list, items, LEAST_BYTES)
    assert [item for part in results for item in part] == items
    assert len(results) == parts


def test_all_work_at_the_same_time(three):
    together = threading.Barrier(3)

    def work(items):
        together.wait(60)
        return threading.get_ident()

    assert len(set(three.share(work, range(3), LEAST_BYTES))) == 3


def test_small_items_stay_with_the_caller(three):
    assert three.share(lambda items: (threading.get_ident(), len(items)), range(9), LEAST_BYTES - 1) == [
        (threading.get_ident(), 9)
    ]


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_is_raised_when_all_have_ended(three, bad):
    """Whoever fails: the memory belongs to the caller again."""
    together, ended = threading.Barrier(3), list[int]()

    def work(items):
        together.wait(60)
        if bad in items:
            raise ValueError(str(bad))
        ended.extend(items)

    with pytest.raises(ValueError, match=str(bad)):
        three.share(work, range(3), LEAST_BYTES)
    assert sorted(ended) == [item for item in range(3) if item != bad]


def test_after_the_end_the_caller_works_alone():
    made, before = Crew(), set(threading.enumerate())
    made.share(list, range(3), LEAST_BYTES)
    assert set(threading.enumerate()) - before
    made.close()
    made.close()
    assert set(threading.enumerate()) <= before
    assert made.share(lambda items: (threading.get_ident(), *items), range(3), LEAST_BYTES) == [
        (threading.get_ident(), number) for number in range(3)
    ]


def test_no_more_threads_than_cores_or_than_pay(monkeypatch):
    for cores, parts in ((1, 1), (2, 2), (64, crew.MOST_THREADS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        made = Crew()
        assert len(made.share(list, range(64), LEAST_BYTES)) == parts
        made.close()
