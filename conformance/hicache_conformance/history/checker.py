"""Checker of histories: finds answers that cannot be, in time linear in the events.

**Model.** A page, told by pool and key, is absent or holds one value; every set has a value of its
own. A set looks whether the page is there and, if it is not, publishes its value whole, at some
moment between its call and its return; two sets that overlap may both publish. A set that answers
`False`, or whose process was killed, may or may not have published. A delete and a clear remove
what they find at some moment of theirs; a clear that raised (rule LC-7) did so never, or at any
moment from its call on, so that it excuses what is missing and rules nothing out. A get answers
from one moment of its own. Every answer is judged against all sets and removals, and not against
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

**Why linear.** The two ends of all calls are visited once, in the order of time. Each client's are
in order already, and Python's sort merges such runs, so that an end costs as many comparisons as
the few clients have binary digits. At each end, for each key of the call, a fixed number of fields
of the page's state is read and written: the latest beginning among the acknowledged sets and among
the removals that have ended, and the latest end of a removal. "There is a set with ..." is then one
comparison with the latest. A clear is one state that all pages of its pool share, so it costs the
same however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.page_patterns import Page, PagePatterns, short
from hicache_conformance.history.events import Call, Event
from hicache_conformance.model.violation import Violation, checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_storage.spec import StorageIdentity


BEFORE_ALL: Final = -1


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


@dataclass(slots=True)
class _Latest:
    """The event that began last of those it was told of."""

    at: int = BEFORE_ALL
    event: Event | None = None

    def tell(self, event: Event) -> None:
        if event.began_at > self.at:
            self.at = event.began_at
            self.event = event

    def copy(self) -> _Latest:
        return _Latest(self.at, self.event)


@dataclass(slots=True)
class _Removals:
    """Deletes of a page, or clears of its pool."""

    running: int = 0
    """Begun and not ended; those that never end, and clears that raised, stay here."""
    last_end: int = BEFORE_ALL
    over: _Latest = field(default_factory=_Latest)
    """Of those that have ended."""

    def begin(self) -> None:
        self.running += 1

    def end(self, event: Event) -> None:
        self.running -= 1
        assert event.ended_at is not None
        self.last_end = max(self.last_end, event.ended_at)
        self.over.tell(event)


@dataclass(slots=True)
class _Set:
    """One page's share of a set."""

    event: Event
    acknowledged: _Latest
    """Of those that had answered before this set began."""
    acknowledged_at: int | None = None


@dataclass(slots=True)
class _Page:
    """All that has to be known about a page at one moment of the sweep."""

    sets: dict[int, _Set] = field(default_factory=dict[int, _Set])
    """By value."""
    unsettled: int = 0
    """Sets that have begun and were not acknowledged."""
    last_acknowledgement: int = BEFORE_ALL
    last_acknowledged: Event | None = None
    acknowledged: _Latest = field(default_factory=_Latest)
    deletes: _Removals = field(default_factory=_Removals)


@dataclass(slots=True)
class _Before:
    """State of a page at the beginning of a get or exists."""

    acknowledged: _Latest
    removals: tuple[_Latest, _Latest]


class HistoryChecker:
    """Checks the history of one identity.

    Args:
        events: in any order.
        keeps: whether pages stay until somebody removes them; not so where they may be evicted.
    """

    def __init__(self, events: Iterable[Event], *, keeps: bool = True) -> None:
        self._events = list(events)
        self._keeps = keeps
        self._pages: dict[tuple[str, str], _Page] = {}
        self._clears = _Removals()
        self._before: dict[int, list[_Before]] = {}
        """By identity of the event."""
        self._later: dict[tuple[str, str, int], Event] | None = None
        self.anomalies = list[Anomaly]()
        self.visits = 0
        """How often a page's state was looked at: what the time is made of."""

    def check(self) -> list[Anomaly]:
        """Visit the whole history; what cannot be, in the order in which it was answered."""
        for is_end, event in _ends(self._events):
            if event.call is Call.CLEAR:
                self.visits += 1
                self._clears.end(event) if is_end else self._clears.begin()
            elif is_end:
                self._end(event)
            else:
                self._begin(event)
        return self.anomalies

    def _begin(self, event: Event) -> None:
        pages = self._visited(event)
        match event.call:
            case Call.SET:
                for page in pages:
                    # A copy of what was acknowledged by now: only that forbids this set to write
                    # (SET-3), and later sets must not count.
                    page.sets[event.begun.value] = _Set(event, page.acknowledged.copy())
                    page.unsettled += 1
            case Call.DELETE:
                for page in pages:
                    page.deletes.begin()
            case _:
                # Remembered from the beginning of the call, because what ends during it may or may
                # not be seen by it.
                self._before[id(event)] = [
                    _Before(
                        page.acknowledged.copy(),
                        (page.deletes.over.copy(), self._clears.over.copy()),
                    )
                    for page in pages
                ]

    def _end(self, event: Event) -> None:
        ended = event.ended
        assert ended is not None
        pages = self._visited(event)
        match event.call:
            case Call.SET:
                for page, ok in zip(pages, ended.done, strict=True):
                    if ok:
                        _acknowledge(page, event)
            case Call.DELETE:
                for page in pages:
                    page.deletes.end(event)
            case Call.GET:
                for index, (page, before) in enumerate(
                    zip(pages, self._before.pop(id(event)), strict=True)
                ):
                    self._judge_get(event, index, page, before, ended.found[index])
            case _:
                judged = zip(pages, self._before.pop(id(event)), strict=True)
                for index, (page, before) in enumerate(judged):
                    if index < ended.hit:
                        self._judge_claim(event, index, page, before)
                    # The first page that was not found is the only one that an exists denies; it
                    # says nothing of those behind.
                    elif index == ended.hit:
                        self._judge_miss(event, index, page, before, AnomalyKind.DENIED)

    def _judge_get(
        self, event: Event, index: int, page: _Page, before: _Before, found: int | bytes | None
    ) -> None:
        if found is None:
            self._judge_miss(event, index, page, before, AnomalyKind.LOST)
        elif isinstance(found, bytes):
            self._find(AnomalyKind.FOREIGN, event, index)
        else:
            self._judge_value(event, index, page, before, found)

    def _judge_value(
        self, event: Event, index: int, page: _Page, before: _Before, value: int
    ) -> None:
        written = page.sets.get(value)
        if written is None:
            later = self._begun_later(event, index, value)
            self._find(AnomalyKind.UNBEGUN, event, index, *([later] if later else []))
            return
        # The latest removal of the page itself and of its whole pool: one that came after the
        # value's set is enough.
        removal = max(before.removals, key=lambda latest: latest.at)
        if (
            written.acknowledged_at is not None
            and removal.event
            and removal.at > written.acknowledged_at
        ):
            self._find(AnomalyKind.REMOVED, event, index, written.event, removal.event)
        elif (
            (earlier := written.acknowledged.event)
            and self._keeps
            and not self._may_be_removed_since(page, earlier.began_at)
        ):
            self._find(AnomalyKind.REWRITTEN, event, index, earlier, written.event)

    def _judge_miss(
        self, event: Event, index: int, page: _Page, before: _Before, kind: AnomalyKind
    ) -> None:
        acknowledged = before.acknowledged
        if (
            self._keeps
            and acknowledged.event
            and not self._may_be_removed_since(page, acknowledged.at)
        ):
            self._find(kind, event, index, acknowledged.event)

    def _judge_claim(self, event: Event, index: int, page: _Page, before: _Before) -> None:
        removal = max(before.removals, key=lambda latest: latest.at)
        # A set that has begun, or whose process was killed, may have published: then a claim proves
        # nothing.
        if (not page.unsettled and page.last_acknowledgement < removal.at) or not page.sets:
            last = page.last_acknowledged
            self._find(
                AnomalyKind.CLAIMED,
                event,
                index,
                *([last, removal.event] if last and removal.event else []),
            )

    def _may_be_removed_since(self, page: _Page, moment: int) -> bool:
        """Return whether a removal that has begun by now did not end before `moment`."""
        return any(
            removals.running or removals.last_end >= moment
            for removals in (page.deletes, self._clears)
        )

    def _begun_later(self, event: Event, index: int, value: int) -> Event | None:
        """The set that wrote a value after it was read, if there is one.

        For the report alone, so found once for all.
        """
        if self._later is None:
            self._later = {
                (event.begun.pool, key, event.begun.value): event
                for event in self._events
                if event.call is Call.SET
                for key in event.keys
            }
        return self._later.get((event.begun.pool, event.keys[index], value))

    def _visited(self, event: Event) -> list[_Page]:
        self.visits += len(event.keys)
        pool = event.begun.pool
        return [self._pages.setdefault((pool, key), _Page()) for key in event.keys]

    def _find(self, kind: AnomalyKind, answer: Event, index: int, *witnesses: Event) -> None:
        ordered = sorted(witnesses, key=lambda event: event.began_at)
        self.anomalies.append(Anomaly(kind, answer.keys[index], index, answer, tuple(ordered)))


def _acknowledge(page: _Page, event: Event) -> None:
    written, ended_at = page.sets[event.begun.value], event.ended_at
    assert ended_at is not None
    if written.acknowledged_at is None:
        page.unsettled -= 1
    written.acknowledged_at = ended_at
    page.last_acknowledgement = ended_at
    page.last_acknowledged = event
    page.acknowledged.tell(event)


def _ends(events: Iterable[Event]) -> list[tuple[bool, Event]]:
    """Both ends of every call, in the order of time.

    Of those at one time, beginnings first, so that they overlap.
    """
    clients = dict[str, list[tuple[int, bool, Event]]]()
    for event in events:
        client = clients.setdefault(event.begun.client, [])
        client.append((event.began_at, False, event))
        if event.ended_at is not None:
            client.append((event.ended_at, True, event))
    merged = [end for client in clients.values() for end in client]
    # Stable and by two fields only: events cannot be compared, and False sorts before True, so that
    # beginnings come first.
    merged.sort(key=lambda end: end[:2])
    return [(is_end, event) for _, is_end, event in merged]


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
        events: in any order.
        identity: of the pages.
        patterns: know what was written.
        rule: broken by an anomaly that `rules` gives no other one.
        keeps: whether pages stay until somebody removes them; not so where they may be evicted.
        rules: by kind of anomaly.

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


def _began_at(event: Event) -> int:
    return event.began_at


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
