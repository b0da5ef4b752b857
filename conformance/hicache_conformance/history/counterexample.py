"""Counterexamples: an impossible answer, and the few calls that rule it out, one line each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.page_patterns import Page, PagePatterns, short
from hicache_conformance.history.checker import Anomaly, AnomalyKind, HistoryChecker
from hicache_conformance.history.events import Call
from hicache_conformance.model.violation import Violation, checked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.history.events import Event
    from hicache_storage.spec import StorageIdentity

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
