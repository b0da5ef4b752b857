"""The history checker finds what cannot be, and nothing else; it says why."""

from __future__ import annotations

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from hicache_conformance.harness.pools import Page, PagePatterns
from hicache_conformance.history.checker import AnomalyKind, Counterexample, HistoryChecker
from hicache_conformance.history.events import Begun, Call, Ended, Event
from hicache_storage.spec import StorageIdentity

IDENTITY = StorageIdentity(model="m", kv_dtype="bfloat16", page_size=2, layout="page_first")
PAGE_BYTES = 64


class Scribe:
    """Writes histories down; times are given in microseconds."""

    def __init__(self):
        self.events = []

    def call(self, call, began, ended, keys=("k",), *, value=0, client=None, **answer):
        number = len(self.events)
        begun = Begun(
            number=number,
            client=client or f"L{number}",
            call=call,
            at=began * 1000,
            pool="kv",
            keys=tuple(keys),
            value=value,
        )
        end = None if ended is None else Ended(number=number, at=ended * 1000, **answer)
        self.events.append(Event(begun, end))
        return self.events[-1]

    def set(self, began, ended, value, *, keys=("k",), **more):
        done = (True,) * len(keys)
        return self.call(Call.SET, began, ended, keys, value=value, done=done, **more)

    def get(self, began, ended, *found, keys=("k",), **more):
        return self.call(Call.GET, began, ended, keys, found=found, **more)

    def delete(self, began, ended, keys=("k",), *, done=(True,)):
        return self.call(Call.DELETE, began, ended, keys, done=done)

    def clear(self, began, ended, raised=""):
        return self.call(Call.CLEAR, began, ended, (), raised=raised)


@pytest.fixture
def scribe():
    return Scribe()


# Against a definition by quantifiers
# -----------------------------------------------------------


@st.composite
def histories(draw):
    """Any histories, most of them impossible."""
    scribe, value, began = Scribe(), 0, 0
    # Mostly one after the other, and few removals, so that calls rule out what later ones answer.
    calls = st.sampled_from([*Call, Call.SET, Call.SET, Call.GET, Call.GET, Call.EXISTS])
    for call in draw(st.lists(calls, min_size=5, max_size=9)):
        began += draw(st.integers(0, 3))
        ended = draw(st.sampled_from([*range(began, began + 5), None]))
        keys = draw(st.sampled_from((("a",), ("b", "a"))))
        done = tuple(draw(st.integers(0, 3)) > 0 for _ in keys)
        match call:
            case Call.SET:
                value += 1
                scribe.call(Call.SET, began, ended, keys, value=value, done=done)
            case Call.GET:
                answer = st.sampled_from([None, *range(1, value + 2), *[value] * 3, b"?"])
                scribe.get(began, ended, *(draw(answer) for _ in keys), keys=keys)
            case Call.EXISTS:
                hit = draw(st.integers(0, len(keys)))
                scribe.call(Call.EXISTS, began, ended, keys, hit=hit)
            case Call.DELETE:
                scribe.delete(began, ended, keys, done=done)
            case Call.CLEAR:
                scribe.clear(began, ended, draw(st.sampled_from(("", "StorageTimeoutError: late"))))
    return scribe.events


class Definition:
    """The anomalies of a history, by trying all events against all.

    `HistoryChecker` says the same by bisection.
    """

    def __init__(self, events, *, keeps):
        self.events = events
        self.keeps = keeps

    def anomalies(self):
        found = set()
        for event in self.events:
            if event.ended is None:
                continue
            for index, key in enumerate(event.keys):
                kind = None
                if event.call is Call.GET:
                    kind = self.of_get(event, key, event.ended.found[index])
                elif event.call is Call.EXISTS and index <= event.ended.hit:
                    kind = (
                        self.of_claim(event, key)
                        if index < event.ended.hit
                        else self.of_miss(event, key, AnomalyKind.DENIED)
                    )
                if kind:
                    found.add((event.begun.number, index, kind))
        return found

    def of_get(self, get, key, found):
        if found is None:
            return self.of_miss(get, key, AnomalyKind.LOST)
        if isinstance(found, bytes):
            return AnomalyKind.FOREIGN
        wrote = next(
            (
                event
                for event in self.sets(key)
                if event.begun.value == found and event.began_at <= get.ended_at
            ),
            None,
        )
        if wrote is None:
            return AnomalyKind.UNBEGUN
        if self.acknowledges(wrote, key) and any(
            before(wrote, gone) and before(gone, get) for gone in self.certain_removals(key)
        ):
            return AnomalyKind.REMOVED
        if self.keeps and any(
            self.acknowledges(event, key)
            and before(event, wrote)
            and not self.removable_since(event, get, key)
            for event in self.sets(key)
        ):
            return AnomalyKind.REWRITTEN
        return None

    def of_miss(self, answer, key, kind):
        lost = any(
            self.acknowledges(event, key)
            and before(event, answer)
            and not self.removable_since(event, answer, key)
            for event in self.sets(key)
        )
        return kind if self.keeps and lost else None

    def of_claim(self, answer, key):
        possible = [event for event in self.sets(key) if event.began_at <= answer.ended_at]
        # An acknowledgement that comes later than the answer has not been seen yet, and excuses it.
        environment_of = [
            event
            for event in possible
            if not (
                self.acknowledges(event, key)
                and event.ended_at < answer.ended_at
                and any(
                    before(event, gone) and before(gone, answer)
                    for gone in self.certain_removals(key)
                )
            )
        ]
        return None if environment_of else AnomalyKind.CLAIMED

    def sets(self, key):
        return [event for event in self.events if event.call is Call.SET and key in event.keys]

    def removals(self, key):
        return [
            event
            for event in self.events
            if event.call is Call.CLEAR or (event.call is Call.DELETE and key in event.keys)
        ]

    def certain_removals(self, key):
        return [
            event
            for event in self.removals(key)
            if event.call is Call.CLEAR or self.acknowledges(event, key)
        ]

    def acknowledges(self, event, key):
        return event.ended is not None and event.ended.done[event.keys.index(key)]

    def removable_since(self, start, answer, key):
        return any(
            gone.began_at <= answer.ended_at
            and (gone.ended_at is None or gone.ended_at >= start.began_at)
            for gone in self.removals(key)
        )


def before(one, two):
    return one.ended_at is not None and one.ended_at < two.began_at


@hypothesis.given(histories(), st.booleans())
@hypothesis.settings(max_examples=1000, deadline=None, database=None)
def test_the_checker_finds_what_the_definition_says(events, keeps):
    swept = {
        (anomaly.answer.begun.number, anomaly.index, anomaly.kind)
        for anomaly in HistoryChecker(events, keeps=keeps).check()
    }
    assert swept == Definition(events, keeps=keeps).anomalies()


@hypothesis.given(histories())
@hypothesis.settings(max_examples=1000, deadline=None, database=None)
def test_a_counterexample_needs_no_other_event_and_all_of_its_own(events):
    counterexample = Counterexample(IDENTITY, PagePatterns(), events)
    for anomaly in HistoryChecker(events).check():
        if anomaly.kind is not AnomalyKind.FOREIGN:
            assert counterexample.headline(anomaly).startswith(f"page {anomaly.index} key ")
        shown = [*anomaly.witnesses, anomaly.answer]
        assert _is_found(anomaly, shown)
        for witness in anomaly.witnesses:
            rest = [event for event in shown if event is not witness]
            # Without the set that came too late its value is nobody's, and without the one that was
            # removed the page was never set.
            needless = witness.call is Call.SET and anomaly.kind in (
                AnomalyKind.UNBEGUN,
                AnomalyKind.CLAIMED,
            )
            assert needless or not _is_found(anomaly, rest)


def _is_found(anomaly, events):
    return any(
        (again.kind, again.answer, again.index) == (anomaly.kind, anomaly.answer, anomaly.index)
        for again in HistoryChecker(events).check()
    )


def steps(pages):
    """Functions that are called to check a history of pages, one of them read again and again."""
    scribe, called = Scribe(), []
    for page in range(pages):
        scribe.set(page, page, page + 1, keys=(f"k{page}",))
        scribe.get(page, page, None, keys=("k0",))
        scribe.delete(page, page, keys=("k0",))
        scribe.clear(pages + page, pages + page)
    checker = HistoryChecker(scribe.events)
    sys.setprofile(lambda frame, event, argument: called.append(event))
    try:
        checker.check()
    finally:
        sys.setprofile(None)
    return len(called)


def test_the_work_grows_with_the_history_and_not_with_its_square():
    assert steps(400) < 2.5 * steps(200)


# How it is told
# ----------------------------------------------------------------------------------------------------------


def told(scribe, patterns=None):
    anomalies = HistoryChecker(scribe.events).check()
    return Counterexample(IDENTITY, patterns or PagePatterns(), scribe.events).violation(
        anomalies, "CC-2"
    )


def test_a_lost_page_breaks_the_rule_of_sets(scribe):
    scribe.set(0, 1, 7)
    scribe.get(2, 3, None)
    violation = told(scribe)
    assert violation.rule == "SET-1"
    assert "was stored (True) and removed by nobody, and a get answers False" in str(violation)


def test_a_clear_that_raised_may_take_effect_later(scribe):
    assert scribe.clear(40, 50, "StorageTimeoutError: late").ended_at is None


def test_a_mixed_page_names_both_writers(scribe):
    patterns = PagePatterns()
    one, two = (patterns.render(Page(IDENTITY, "kv", "k", value), PAGE_BYTES) for value in (7, 8))
    scribe.set(0, 2, 7, client="A")
    scribe.set(1, None, 8, client="B")
    scribe.set(1, 2, 9, client="C")
    scribe.get(3, 4, one[:32] + two[32:], client="D")
    violation = told(scribe, patterns)
    assert violation.rule == "CC-2"
    assert (
        "page 0 key 'k' of pool 'kv' holds the bytes of set number 8 of this key, not of number 7 "
        "at byte 32 (2 of 64 bytes differ)" in str(violation)
    )
    lines = violation.__notes__[0].splitlines()[1:]
    assert [line.split()[4] for line in lines] == ["A", "B", "D"]
    assert "never" in lines[1]
    assert lines[1].endswith("killed in the call")


def test_wrong_bytes_are_told_before_missing_ones(scribe):
    scribe.set(0, 1, 7)
    scribe.get(2, 3, None)
    scribe.get(4, 5, b"?" * PAGE_BYTES)
    violation = told(scribe)
    assert violation.rule == "CC-2"
    assert violation.__notes__[-1] == "1 more answers of this history cannot be."
