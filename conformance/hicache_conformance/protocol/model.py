"""Ownership model of a scope's slots, kept beside the server.

And the invariants after each step of a history.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_conformance.model.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.protocol.sglang_client import SglangScope

SHOWN_STEPS = 40


@dataclass(slots=True)
class OwnershipModel:
    """One scope's history, as seen by the only ones who change it."""

    scope: SglangScope
    pages: int
    keys: list[str]
    lease_seconds: float
    """How long a reservation counts; only as long may somebody else not have its slot."""
    has_room: bool
    """Whether the server has no reason to evict anything."""
    stored: dict[str, int] = field(default_factory=dict[str, int])
    """Keys that were confirmed and not deleted, and their slots; the server may have evicted
    them."""
    held: dict[int, tuple[str, float]] = field(default_factory=dict[int, tuple[str, float]])
    """Slots that are reserved, their keys, and until when."""
    released: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Reservations that have ended without a confirm."""
    expired: list[int] = field(default_factory=list[int])
    """Slots whose reservations may have ended by themselves."""
    steps: list[str] = field(default_factory=list[str])
    slowest: float = 0.0
    """Seconds that the longest step took."""
    _noted: float = field(default_factory=time.monotonic)

    def name(self, key: str) -> str:
        """A short name for a key in the history."""
        return f"k{self.keys.index(key)}"

    def note(self, step: str) -> None:
        """Write down what was done."""
        self.steps.append(step)
        now = time.monotonic()
        self.slowest = max(self.slowest, now - self._noted)
        self._noted = now

    def forget_expired(self) -> None:
        """Reservations that may have ended by themselves count no more."""
        now = time.monotonic()
        for index in [index for index, (_, until) in self.held.items() if until < now]:
            del self.held[index]
            self.expired.append(index)

    def reserve(self, keys: Sequence[str], client: SglangScope) -> None:
        """Reserve, and see that slots that are given out belong to nobody."""
        begin = time.monotonic()
        answer = client.reserve(keys, rule="MD-RES-2")
        self.note(
            f"reserve {' '.join(map(self.name, keys))} -> "
            f"{' '.join(_told(*pair) for pair in answer)}"
        )
        self.forget_expired()
        for key, (exists, index) in zip(keys, answer, strict=True):
            if exists or index == -1:
                continue
            if index >= self.pages:
                self.fail(f"slot {index} of {self.pages} is given out")
            if index in self.held:
                self.fail(
                    f"slot {index} is given to {self.name(key)} while "
                    f"{self.name(self.held[index][0])} has it reserved"
                )
            # Counted from before the request: the server's own clock begins later, so that the
            # model lets go first and never blames a server for a lease that ended on time.
            self.held[index] = (key, begin + self.lease_seconds)
        self.check_invariants()

    def confirm(self, index: int, client: SglangScope) -> None:
        """Confirm a reservation."""
        # Before the call, since the reservation ends with it, whatever is answered.
        key, _ = self.held.pop(index)
        client.confirm([(key, index)])
        self.note(f"confirm {self.name(key)} in {index}")
        self.stored[key] = index
        self.check_invariants()

    def release(self, index: int, client: SglangScope) -> None:
        """Give a reservation back."""
        key, _ = self.held.pop(index)
        client.confirm([], [index])
        self.note(f"release {index} of {self.name(key)}")
        self.released.append((key, index))
        self.check_invariants()

    def confirm_late(self, key: str, index: int, client: SglangScope) -> None:
        """Confirm a reservation that has ended."""
        reply = client.try_confirm([(key, index)])
        # Any answer is right that is no fault; what counts is what the keys map to afterwards.
        self.note(f"late confirm {self.name(key)} in {index} -> {reply.status}")
        self.check_invariants()

    def release_late(self, key: str, index: int, client: SglangScope) -> None:
        """Give back what was given back already."""
        reply = client.try_confirm([], [index])
        self.note(f"late release {index} of {self.name(key)} -> {reply.status}")
        self.check_invariants()

    def delete(self, keys: Sequence[str], client: SglangScope) -> None:
        """Make keys go."""
        client.delete(keys)
        self.note(f"delete {' '.join(map(self.name, keys))}")
        for key in keys:
            self.stored.pop(key, None)
        self.check_invariants()

    def check_invariants(self) -> None:
        """Compare with what the server says.

        No slot belongs to two keys, and none is elsewhere than it was confirmed.

        Raises:
            Violation: they differ.
        """
        # All keys of the history after each step, in one request: the step that broke the map is
        # then the last one in the report.
        found = self.scope.indices(self.keys, rule="MD-SLOT-1")
        self.forget_expired()
        owners = dict[int, str]()
        for key, index in zip(self.keys, found, strict=True):
            if index is None:
                if key in self.stored:
                    if self.has_room:
                        self.fail(f"{self.name(key)} is gone, and nobody deleted it or wanted room")
                    # Evicted for a page that wanted room, which is legal in a full scope.
                    del self.stored[key]
                continue
            if index in owners:
                self.fail(
                    f"slot {index} belongs to {self.name(owners[index])} and to {self.name(key)}"
                )
            # A reserved slot is about to be written: a reader that is told of it reads half a page.
            if index in self.held:
                self.fail(
                    f"slot {index} is announced for {self.name(key)} while "
                    f"{self.name(self.held[index][0])} has it reserved"
                )
            if self.stored.get(key) != index:
                self.fail(
                    f"{self.name(key)} is found in slot {index}; expected "
                    f"{self.stored.get(key, 'nowhere')}"
                )
            owners[index] = key

    def fail(self, what: str) -> None:
        """The history, and what is wrong at its end."""
        violation = Violation("MD-SLOT-1", what)
        violation.add_note(
            "The history, oldest step first:\n  " + "\n  ".join(self.steps[-SHOWN_STEPS:])
        )
        raise violation


def _told(exists: bool, index: int) -> str:
    return f"{index}(there)" if exists else str(index)
