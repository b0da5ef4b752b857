"""An active fault plan: counts operations, and selects the faults of each."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.fault_plan import Fault, FaultKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


MAX_HANG_SECONDS: Final = 60.0
"""A hang ends after this long even without `heal`, so that no process is stuck for good where the
suite was killed."""


class ActiveFaults:
    """Faults on some operations. Thread-safe."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._passed = [0] * len(self._faults)
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self.injected_count = 0
        """Operations that a fault has hit."""

    def at(self, operation: str) -> list[Fault]:
        """Return the faults that hit the operation that begins now."""
        # Without the lock: most operations meet no fault, and a lock would make the threads of a
        # driver wait for each other.
        if not self._faults or self._healed.is_set():
            return []
        found: list[Fault] = []
        # Guards the counters. Two threads that read one number would both be the operation that a
        # fault of `count=1` hits.
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.operations and operation not in fault.operations:
                    continue
                number, self._passed[index] = self._passed[index], self._passed[index] + 1
                if number >= fault.first and (
                    not fault.count or number < fault.first + fault.count
                ):
                    found.append(fault)
            self.injected_count += bool(found)
        return found

    def apply(self, faults: Iterable[Fault]) -> None:
        """Apply delays and hangs, and then errors.

        Raises:
            OSError: one of the faults is an error.
        """
        for fault in faults:
            if fault.kind is FaultKind.DELAY:
                self._healed.wait(fault.seconds)
            elif fault.kind is FaultKind.HANG:
                self._healed.wait(MAX_HANG_SECONDS)
        # Errors come after the delays, so that a plan of both is a call that takes long and fails,
        # as with a lost server.
        for fault in faults:
            if fault.kind is FaultKind.ERROR:
                raise failure(fault.error)

    def heal(self) -> None:
        """End the faults, and release the operations that hang."""
        self._healed.set()


def failure(name: str) -> OSError:
    """The error of this `errno`."""
    number: int = getattr(errno, name)
    return OSError(number, os.strerror(number))


def find_fault(faults: Iterable[Fault], kind: FaultKind) -> Fault | None:
    """Return the fault of a kind among those that hit an operation."""
    return next((fault for fault in faults if fault.kind is kind), None)


def flipped(content: bytes | bytearray | memoryview, place: float) -> bytes:
    """The bytes with one bit changed at a fraction of their length."""
    changed = bytearray(content)
    if changed:
        changed[min(int(place * len(changed)), len(changed) - 1)] ^= 1
    return bytes(changed)
