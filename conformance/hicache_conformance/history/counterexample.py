"""Tells a finding: what was answered, and the few calls that rule it out, one line each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.page_patterns import Page, PageBook, short
from hicache_conformance.history.events import Call
from hicache_conformance.history.findings import Finding, Kind
from hicache_conformance.model.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.harness.page_patterns import Passage
    from hicache_conformance.history.events import Event
    from hicache_storage.spec import StorageIdentity

PASSAGES: Final = 6
"""Most pieces of a wrong page that are told."""

RULES: Final[Mapping[Kind, str]] = {
    Kind.REWRITTEN: "SET-3",
    Kind.LOST: "SET-1",
    Kind.DENIED: "EX-2",
}
"""Rules that a kind of finding breaks, whatever the case; any other breaks the rule that the case is about."""

# As `Kind` lists them: wrong bytes tell more than missing ones.
_WORST_FIRST: Final = tuple(Kind)

_REASONS: Final = {
    Kind.UNBEGUN: "which no set had begun to write when the get ended",
    Kind.REMOVED: "which had been removed before the get began",
    Kind.REWRITTEN: "whose set began when the page was there already",
    Kind.LOST: "was stored (True) and removed by nobody, and a get answers False",
    Kind.DENIED: "was stored (True) and removed by nobody, and exists does not find it",
    Kind.CLAIMED: "is said to exist, and nobody had begun to set it",
}


class Story:
    """Tells the findings of one history."""

    def __init__(self, identity: StorageIdentity, book: PageBook, events: Sequence[Event]) -> None:
        self._identity, self._book, self._events = identity, book, events

    def violation(self, findings: Sequence[Finding], rule: str, rules: Mapping[Kind, str] = RULES) -> Violation:
        """The worst finding as the violation of a rule, with its counterexample as a note; of equal ones the first."""
        first = self._complete(min(findings, key=lambda finding: _WORST_FIRST.index(finding.kind)))
        violation = Violation(rules.get(first.kind, rule), self.headline(first))
        violation.add_note("\n".join(self.counterexample(first)))
        if len(findings) > 1:
            violation.add_note(f"{len(findings) - 1} more answers of this history cannot be.")
        return violation

    def headline(self, finding: Finding) -> str:
        """The finding in one line."""
        event = finding.answer
        where = f"page {finding.index} key {short(finding.key)} of pool {event.begun.pool!r}"
        found = event.ended.found[finding.index] if event.ended and event.call is Call.GET else None
        if isinstance(found, bytes):
            return f"{where} {self._pieces(finding, found)}"
        value = f"was delivered with value {found}, " if found is not None else ""
        if finding.kind is Kind.CLAIMED and finding.witnesses:
            return f"{where} is said to exist, and it had been removed"
        return f"{where} {value}{_REASONS[finding.kind]}"

    def counterexample(self, finding: Finding) -> list[str]:
        """The calls that matter, in the order of time: milliseconds from the first to begin, who, what, and the answer."""
        calls = sorted({id(event): event for event in (*finding.witnesses, finding.answer)}.values(), key=_began_at)
        zero = calls[0].began_at
        rows = [self._row(event, finding.key, zero) for event in calls]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"  {began:>{widths[0]}} .. {ended:>{widths[1]}} ms  {lane:<{widths[2]}}  {what:<{widths[3]}}  {answer}".rstrip()
            for began, ended, lane, what, answer in rows
        ]
        return [f"The calls that matter for key {short(finding.key)} of pool {finding.answer.begun.pool!r}:", *lines]

    def _complete(self, finding: Finding) -> Finding:
        """Add the sets whose bytes make up a page that is none."""
        if finding.kind is not Kind.FOREIGN:
            return finding
        values = {piece.generation for piece in self._passages(finding)} - {None}
        writers = [
            event
            for event in self._events
            if event.call is Call.SET
            and event.begun.value in values
            and event.begun.pool == finding.answer.begun.pool
            and finding.key in event.keys
        ]
        return replace(finding, witnesses=tuple(writers))

    def _passages(self, finding: Finding) -> list[Passage]:
        found = finding.answer.ended.found[finding.index] if finding.answer.ended else None
        assert isinstance(found, bytes)
        return self._book.passages(found, Page(self._identity, finding.answer.begun.pool, finding.key))

    def _pieces(self, finding: Finding, found: bytes) -> str:
        pieces = self._passages(finding)
        told = [
            f"{f'is value {piece.generation}' if piece.generation is not None else piece.words} in bytes {piece.start}..{piece.end - 1}"
            for piece in pieces[:PASSAGES]
        ]
        more = f" and {len(pieces) - PASSAGES} more pieces" if len(pieces) > PASSAGES else ""
        return f"{', '.join(told)}{more} of {len(found)}"

    def _row(self, event: Event, key: str, zero: int) -> tuple[str, str, str, str, str]:
        ended = "never" if event.ended is None else f"{(event.ended.at - zero) / 1e6:.3f}"
        return f"{(event.began_at - zero) / 1e6:.3f}", ended, event.begun.lane, _what(event, key), _answer(event, key)


def _began_at(event: Event) -> int:
    return event.began_at


def _what(event: Event, key: str) -> str:
    if event.call is Call.CLEAR:
        return "clear"
    place = f"page {event.keys.index(key)} of {len(event.keys)}"
    return f"set value {event.begun.value}, {place}" if event.call is Call.SET else f"{event.call}, {place}"


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
            return "False" if found is None else "no value" if isinstance(found, bytes) else f"value {found}"
        case Call.EXISTS:
            return f"{ended.hit} of {len(event.keys)} pages"
        case _:
            return str(ended.done[index])
