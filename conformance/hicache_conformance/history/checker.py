"""Checker of histories: finds answers that cannot be.

**Model.** A page, told by pool and key, is absent or holds one value; every set has a value of its
own. A set looks whether the page is there and, if it is not, publishes its value whole, at some
moment between its call and its return; two sets that overlap may both publish. A set that answers
`False`, or whose process was killed, may or may not have published. A delete and a clear remove
what they find at some moment of theirs; a delete that answered `False`, because it found nothing or
failed, did so or not; a clear that raised (rule LC-7) did so never, or at any moment from its call
on: both excuse what is missing and rule nothing out. A get answers from one moment of its own. Every answer is judged against all sets and removals, and not against
the values that other gets saw: caches of several values are not forbidden.

**What is found**, with `a < b` for "a had ended before b began":

- a get whose bytes are no value (`FOREIGN`), or a value whose set began after the get had ended
  (`UNBEGUN`);
- a get of value v, with a removal so that v's set, answered `True`, < removal < get (`REMOVED`);
- a get of value v, with a set e, answered `True`, < v's set, and no removal that can have come
  after e (`REWRITTEN`, rule SET-3). Until a set of it has answered, a page is promised to nobody,
  though some may find it;
- a get that misses, or an exists that denies, with a set, answered `True`, < get, and no removal
  that can have come after that set (`LOST`, `DENIED`, rule SET-1). Where pages may be evicted,
  neither this nor the one before is concluded;
- an exists that finds a page whose every set began later or was removed (`CLAIMED`).

**Cost.** "There is a set with ..." is one comparison with the latest of those that are known at a
time. For each page these are looked up by bisection, in the order in which they became known; clears
are one order for all pages. So an answer costs as many steps as a history has binary digits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.pools import Page, PagePatterns, short
from hicache_conformance.history.events import Call, Event
from hicache_conformance.model.case import Violation, checked

if TYPE_CHECKING:
    from hicache_storage.spec import StorageIdentity


class AnomalyKind(StrEnum):
    """Kinds of impossible answers."""

    FOREIGN = "foreign"
    """A get delivered bytes that are no value of this page: half of one, two mixed, another page's,
    or nobody's."""
    UNBEGUN = "unbegun"
    """A get delivered a value that no set had begun to write when it ended."""
    REMOVED = "removed"
    """A get delivered a value that a delete or clear had removed."""
    LOST = "lost"
    """A get missed a page that had been acknowledged, and that nobody had removed."""
    REWRITTEN = "rewritten"
    """A get delivered the value of a set that began when the page was there already. What was lost
    is set anew: the loss is worse."""
    DENIED = "denied"
    """Exists did not find such a page."""
    CLAIMED = "claimed"
    """Exists found a page that nobody had begun to set, or that was removed."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One answer that cannot be, and why."""

    kind: AnomalyKind
    key: str
    index: int
    """Place of the key in its call."""
    answer: Event
    """The call that was answered so."""
    witnesses: tuple[Event, ...] = ()
    """What was done to the page and rules the answer out, in the order of time. No other event is
    needed."""


Latest = tuple[float, Event | None]
Finding = tuple[AnomalyKind, Sequence[Event | None]]
"""What cannot be, and its witnesses."""
NOTHING: Final[Latest] = (-1.0, None)


class _Past:
    """Of events, the latest one among those that are known at a time.

    Args:
        events: each with the time from which it is known, and the one by which it is the latest.
    """

    def __init__(self, events: Iterable[tuple[float, float, Event]]) -> None:
        ordered = sorted(events, key=itemgetter(0))
        self._known = [known for known, _, _ in ordered]
        self._latest: list[Latest] = list(
            accumulate((each[1:] for each in ordered), _later, initial=NOTHING)
        )

    def before(self, moment: float) -> Latest:
        """Of the events that are known before a moment."""
        return self._latest[bisect_left(self._known, moment)]

    def until(self, moment: float) -> Latest:
        """Of the events that are known at a moment, too."""
        return self._latest[bisect_right(self._known, moment)]


class _Removals:
    """Deletes of a page, or clears of all.

    Args:
        events: in the order of their beginnings.
        certain: those that have removed what they found, if they have ended.
    """

    def __init__(self, events: Sequence[Event], certain: Iterable[Event]) -> None:
        self.ended = _Past(
            (event.ended_at, event.began_at, event)
            for event in certain
            if event.ended_at is not None
        )
        """Of the certain ones, the one that began last."""
        self.begun = _Past((event.began_at, _end_of(event), event) for event in events)
        """The one that ends last, if ever."""


class _Page:
    """What was done to a page."""

    def __init__(self, key: str, events: Sequence[Event], clears: _Removals) -> None:
        sets = [event for event in events if event.call is Call.SET]
        acknowledged = {id(event): event for event in sets if _is_done(event, key)}
        self.acknowledged = _Past(
            (_end_of(event), event.began_at, event) for event in acknowledged.values()
        )
        """The one that began last."""
        self.sets = _Past(
            (event.began_at, _end_of(event) if id(event) in acknowledged else inf, event)
            for event in sets
        )
        """The one that was acknowledged last, if ever."""
        self.values = dict[int, list[tuple[Event, bool]]]()
        """Sets, and whether they were acknowledged, by what they write."""
        for event in sets:
            written = self.values.setdefault(event.begun.value, [])
            written.append((event, id(event) in acknowledged))
        deletes = [event for event in events if event.call is Call.DELETE]
        certain = [event for event in deletes if _is_done(event, key)]
        self._removals = (_Removals(deletes, certain), clears)

    def removed_before(self, moment: int) -> Latest:
        """The removal that began last of those that had ended."""
        return max((each.ended.before(moment) for each in self._removals), key=itemgetter(0))

    def may_be_removed(self, since: float, until: int) -> bool:
        """Return whether a removal that has begun by a moment did not end before another."""
        return any(each.begun.until(until)[0] >= since for each in self._removals)


class HistoryChecker:
    """Checks the history of one identity.

    Args:
        events: in any order.
        keeps: whether pages stay until somebody removes them; not so where they may be evicted.
    """

    def __init__(self, events: Iterable[Event], *, keeps: bool = True) -> None:
        self._events = sorted(events, key=_began_at)
        self._keeps = keeps

    def check(self) -> list[Anomaly]:
        """Judge each get and exists; what cannot be, in the order in which it was answered."""
        done: dict[tuple[str, str], list[Event]] = {}
        for event in self._events:
            for key in event.keys:
                changed = done.setdefault((event.begun.pool, key), [])
                if event.call in (Call.SET, Call.DELETE):
                    changed.append(event)
        cleared = [event for event in self._events if event.call is Call.CLEAR]
        clears = _Removals(cleared, cleared)
        pages = {page: _Page(page[1], changed, clears) for page, changed in done.items()}
        answered = [
            event
            for event in self._events
            if event.ended_at is not None and event.call in (Call.GET, Call.EXISTS)
        ]
        found = list[Anomaly]()
        for event in sorted(answered, key=_end_of):
            for index, key in enumerate(event.keys):
                judged = self._judged(event, index, pages[event.begun.pool, key])
                if judged is not None:
                    ordered = sorted(filter(None, judged[1]), key=_began_at)
                    found.append(Anomaly(judged[0], key, index, event, tuple(ordered)))
        return found

    def _judged(self, event: Event, index: int, page: _Page) -> Finding | None:
        assert event.ended is not None
        if event.call is Call.EXISTS:
            if index < event.ended.hit:
                return self._judged_claim(event, page)
            # The first page that was not found is the only one that an exists denies; it says
            # nothing of those behind.
            denied = index == event.ended.hit
            return self._judged_miss(event, page, AnomalyKind.DENIED) if denied else None
        value = event.ended.found[index]
        if value is None:
            return self._judged_miss(event, page, AnomalyKind.LOST)
        if isinstance(value, bytes):
            return AnomalyKind.FOREIGN, ()
        return self._judged_value(event, page, value)

    def _judged_value(self, event: Event, page: _Page, value: int) -> Finding | None:
        assert event.ended_at is not None
        written = page.values.get(value, [])
        begun = [each for each in written if each[0].began_at <= event.ended_at]
        if not begun:
            return AnomalyKind.UNBEGUN, [later for later, _ in written[:1]]
        last, acknowledged = begun[-1]
        removed_at, removal = page.removed_before(event.began_at)
        if acknowledged and removed_at > _end_of(last):
            return AnomalyKind.REMOVED, (last, removal)
        # Only what was acknowledged before the set began forbids it to write (SET-3).
        earlier_at, earlier = page.acknowledged.before(last.began_at)
        if self._keeps and earlier and not page.may_be_removed(earlier_at, event.ended_at):
            return AnomalyKind.REWRITTEN, (earlier, last)
        return None

    def _judged_miss(self, event: Event, page: _Page, kind: AnomalyKind) -> Finding | None:
        assert event.ended_at is not None
        acknowledged_at, acknowledged = page.acknowledged.before(event.began_at)
        lost = (
            self._keeps
            and acknowledged
            and not page.may_be_removed(acknowledged_at, event.ended_at)
        )
        return (kind, [acknowledged]) if lost else None

    def _judged_claim(self, event: Event, page: _Page) -> Finding | None:
        removed_at, removal = page.removed_before(event.began_at)
        # A set that has begun, or whose process was killed, may have published: then a claim proves
        # nothing.
        last_at, last = page.sets.until(_end_of(event))
        if last is None:
            return AnomalyKind.CLAIMED, ()
        return (AnomalyKind.CLAIMED, (last, removal)) if last_at < removed_at else None


def _is_done(event: Event, key: str) -> bool:
    return event.ended is not None and event.ended.done[event.keys.index(key)]


def _later(one: Latest, two: Latest) -> Latest:
    return max(one, two, key=itemgetter(0))


def _began_at(event: Event) -> int:
    return event.began_at


def _end_of(event: Event) -> float:
    return inf if event.ended_at is None else event.ended_at


RULES: Final[Mapping[AnomalyKind, str]] = {
    AnomalyKind.REWRITTEN: "SET-3",
    AnomalyKind.LOST: "SET-1",
    AnomalyKind.DENIED: "EX-2",
}
"""Rules that a kind of anomaly breaks, whatever the case; any other breaks the rule that the case
is about."""

# As `AnomalyKind` lists them: wrong bytes tell more than missing ones.
_WORST_FIRST: Final = tuple(AnomalyKind)

_REASONS: Final = {
    AnomalyKind.UNBEGUN: "which no set had begun to write when the get ended",
    AnomalyKind.REMOVED: "which had been removed before the get began",
    AnomalyKind.REWRITTEN: "whose set began when the page was there already",
    AnomalyKind.LOST: "was stored (True) and removed by nobody, and a get answers False",
    AnomalyKind.DENIED: "was stored (True) and removed by nobody, and exists does not find it",
    AnomalyKind.CLAIMED: "is said to exist, and nobody had begun to set it",
}


def judge(
    events: Sequence[Event],
    identity: StorageIdentity,
    patterns: PagePatterns,
    rule: str,
    *,
    keeps: bool,
    rules: Mapping[AnomalyKind, str] = RULES,
) -> None:
    """Check the history of one identity.

    Args:
        rule: broken by an anomaly that `rules` gives no other one.

    Raises:
        Violation: something that was answered cannot be.
    """
    checked(rule, *rules.values())
    anomalies = HistoryChecker(events, keeps=keeps).check()
    if anomalies:
        raise Counterexample(identity, patterns, events).violation(anomalies, rule, rules)


class Counterexample:
    """Tells the anomalies of one history."""

    def __init__(
        self, identity: StorageIdentity, patterns: PagePatterns, events: Sequence[Event]
    ) -> None:
        self._identity = identity
        self._patterns = patterns
        self._events = events

    def violation(
        self, anomalies: Sequence[Anomaly], rule: str, rules: Mapping[AnomalyKind, str] = RULES
    ) -> Violation:
        """The worst anomaly as the violation of a rule, with its counterexample as a note.

        Of equal ones the first.
        """
        # Only the worst one is told in full. A single lost update makes dozens of later answers
        # impossible, which say nothing new.
        first = self._complete(min(anomalies, key=lambda anomaly: _WORST_FIRST.index(anomaly.kind)))
        violation = Violation(rules.get(first.kind, rule), self.headline(first))
        violation.add_note("\n".join(self.counterexample(first)))
        if len(anomalies) > 1:
            violation.add_note(f"{len(anomalies) - 1} more answers of this history cannot be.")
        return violation

    def headline(self, anomaly: Anomaly) -> str:
        """The anomaly in one line."""
        event = anomaly.answer
        where = f"page {anomaly.index} key {short(anomaly.key)} of pool {event.begun.pool!r}"
        found = event.ended.found[anomaly.index] if event.ended and event.call is Call.GET else None
        if isinstance(found, bytes):
            # What differs from the generation of the page's beginning.
            page = Page(self._identity, event.begun.pool, anomaly.key)
            first = replace(page, generation=[*self._patterns.generations(found), 0][0])
            return f"{where} {self._patterns.explain(found, first)}"
        value = f"was delivered with value {found}, " if found is not None else ""
        if anomaly.kind is AnomalyKind.CLAIMED and anomaly.witnesses:
            return f"{where} is said to exist, and it had been removed"
        return f"{where} {value}{_REASONS[anomaly.kind]}"

    def counterexample(self, anomaly: Anomaly) -> list[str]:
        """The calls that matter, in the order of time.

        Milliseconds from the first to begin, client, call and answer.
        """
        calls = sorted(
            {id(event): event for event in (*anomaly.witnesses, anomaly.answer)}.values(),
            key=_began_at,
        )
        zero = calls[0].began_at
        rows = [self._row(event, anomaly.key, zero) for event in calls]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"  {began:>{widths[0]}} .. {ended:>{widths[1]}} ms  {client:<{widths[2]}}  "
            f"{what:<{widths[3]}}  {answer}".rstrip()
            for began, ended, client, what, answer in rows
        ]
        return [
            (
                f"The calls that matter for key {short(anomaly.key)} of pool "
                f"{anomaly.answer.begun.pool!r}:"
            ),
            *lines,
        ]

    def _complete(self, anomaly: Anomaly) -> Anomaly:
        """Add the sets whose bytes make up a page that is none."""
        if anomaly.kind is not AnomalyKind.FOREIGN:
            return anomaly
        found = anomaly.answer.ended.found[anomaly.index] if anomaly.answer.ended else None
        assert isinstance(found, bytes)
        # The generations in the page name the sets that were mixed, by one writer each.
        values = self._patterns.generations(found)
        writers = [
            event
            for event in self._events
            if event.call is Call.SET
            and event.begun.value in values
            and event.begun.pool == anomaly.answer.begun.pool
            and anomaly.key in event.keys
        ]
        return replace(anomaly, witnesses=tuple(writers))

    def _row(self, event: Event, key: str, zero: int) -> tuple[str, str, str, str, str]:
        ended = "never" if event.ended is None else f"{(event.ended.at - zero) / 1e6:.3f}"
        return (
            f"{(event.began_at - zero) / 1e6:.3f}",
            ended,
            event.begun.client,
            _what(event, key),
            _answer(event, key),
        )


def _what(event: Event, key: str) -> str:
    if event.call is Call.CLEAR:
        return "clear"
    place = f"page {event.keys.index(key)} of {len(event.keys)}"
    return (
        f"set value {event.begun.value}, {place}"
        if event.call is Call.SET
        else f"{event.call}, {place}"
    )


def _answer(event: Event, key: str) -> str:
    ended = event.ended
    if ended is None:
        return "killed in the call"
    if event.call is Call.CLEAR:
        return f"raised {ended.raised}" if ended.raised else "returned"
    index = event.keys.index(key)
    match event.call:
        case Call.GET:
            found = ended.found[index]
            return (
                "False"
                if found is None
                else "no value"
                if isinstance(found, bytes)
                else f"value {found}"
            )
        case Call.EXISTS:
            return f"{ended.hit} of {len(event.keys)} pages"
        case _:
            return str(ended.done[index])
