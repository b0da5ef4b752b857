"""Anomalies of a history: their kinds, and the events that prove one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_conformance.history.events import Event


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
