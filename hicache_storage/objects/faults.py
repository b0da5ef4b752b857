"""Faults below a storage: the guard around foreign calls, and the damaged pages that it found."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sized
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.objects.lifecycle import ForkAware
from hicache_storage.observability.logs import fields
from hicache_storage.spec import (
    DriverContractError,
    MissReason,
    StorageUnavailableError,
    is_refusal,
    note_answer_from_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.objects.batches import Call, LookupBatch
    from hicache_storage.objects.lifecycle import Lifecycle
    from hicache_storage.objects.namespace import Namespace
    from hicache_storage.objects.recorder import StatsRecorder

logger = logging.getLogger(__name__)

MAX_REMEMBERED_DAMAGE = 65_536
"""Limit of the damaged pages that are remembered.

Remembered, so that the next set repairs them; beyond this the oldest are forgotten and found again.
"""

CHANGING = frozenset({"write", "delete", "discard"})
"""Operations that need more than to read: one on a read-only store is refused, which is no fault."""

MOVING = frozenset({"read", "write"})
"""Operations that may answer without having touched what fails.

A driver that knows that no page is there reads none.
"""

ItemT = TypeVar("ItemT")
BatchT = TypeVar("BatchT", bound=Sized)


class FaultGuard:
    """Calls a driver, or an engine's pool: a fault is counted, logged once an episode, and a miss.

    Args:
        driver_name: name in messages.
        lifecycle: connects before the first call of the driver.
        recorder: counts the faults.
    """

    def __init__(self, driver_name: str, lifecycle: Lifecycle, recorder: StatsRecorder) -> None:
        self._driver_name = driver_name
        self._lifecycle = lifecycle
        self._recorder = recorder
        self.refusal = ""
        """Reason of the last set that was refused; empty once another has stored something."""
        self.faulty = set[str]()
        """Operations that have failed since the last success; empty while the store serves."""

    def ask(
        self,
        operation: str,
        method: Callable[[Sequence[BatchT], Call], list[list[bool]]],
        batches: Sequence[BatchT],
        call: Call,
    ) -> list[list[bool]]:
        """Call a method of the driver for the batches that are not empty.

        A fault, or an answer of the wrong shape, is `False` for every object (rule FT-1). After the
        deadline the driver is not called, which is no fault of the store.
        """
        asked = [batch for batch in batches if len(batch)]

        def shows_service(answers: list[list[bool]]) -> bool:
            if [len(answer) for answer in answers] != [len(batch) for batch in asked]:
                raise DriverContractError(
                    "the driver answered for another number of objects than it was asked for"
                )
            return operation not in MOVING or any(map(any, answers))

        answers = None
        if call.expired():
            note_answer_from_memory()
            call.miss_reason = MissReason.DEADLINE
        elif asked:
            answers = self.run(operation, lambda: method(asked, call), shows_service, call=call)
        if answers is None:
            return [[False] * len(batch) for batch in batches]
        answered = iter(answers)
        return [next(answered) if len(batch) else [] for batch in batches]

    def run(
        self,
        operation: str,
        question: Callable[[], ItemT],
        shows_service: Callable[[ItemT], bool] = lambda _: True,
        *,
        connects: bool = True,
        call: Call | None = None,
    ) -> ItemT | None:
        """Call foreign code; None after a fault.

        Args:
            shows_service: raises for an answer that is none, and returns True for one which shows
                that the store serves again after faults.
            connects: the driver is called, and not an engine's pool.
            call: is told why it has missed.
        """
        try:
            # Inside the guard: a store that cannot be reached is a miss, too, and not an error
            # (rule FT-1). Without a lock: `connected` becomes false in `close` only, which first
            # waits for calls such as this one.
            if connects and not self._lifecycle.connected:
                self._lifecycle.ensure_connected()
            answer = question()
            serves = shows_service(answer)
        except Exception as error:  # noqa: BLE001 - a fault below, even a driver's bug, must not reach the engine
            refused = self._note_fault(operation, error)
            if call is not None:
                call.miss_reason = (
                    MissReason.REFUSED
                    if refused
                    else MissReason.DEADLINE
                    if call.expired()
                    else MissReason.FAULT
                )
            return None
        # Only an operation that has failed ends an episode of faults: on a full disk, lookups
        # succeed all the time.
        if serves and operation in self.faulty:
            self.faulty = set()
            logger.info(
                "%s: serving again",
                self._driver_name,
                extra=fields(driver=self._driver_name, operation=operation),
            )
        return answer

    def _note_fault(self, operation: str, error: Exception) -> bool:
        """Count and log a fault; True if the store has refused the call, which is none."""
        refused = is_refusal(error, reads=operation not in CHANGING)
        if not refused:
            self._recorder.count_fault()
        if refused and operation == "write":
            # An episode of its own: a disk may be full for days, and a fault of reads has to be
            # seen meanwhile.
            begins, text = not self.refusal, "sets are refused"
            self.refusal = str(error) or repr(error)
        else:
            begins = not self.faulty
            text = "answering misses" if begins else "still answering misses"
            self.faulty.add(operation)
        expected = isinstance(error, (StorageUnavailableError, OSError))
        # One warning for an episode: a store that is down fails each call.
        logger.log(
            logging.WARNING if begins else logging.DEBUG,
            "%s: %s: %s",
            self._driver_name,
            text,
            error,
            # Only an unexpected exception has a traceback in the log: it may be a bug of the
            # driver. A store that is down says enough in its message.
            exc_info=None if expected else error,
            extra=fields(driver=self._driver_name, operation=operation),
        )
        return refused

    def note_stored(self) -> None:
        """End an episode of refused sets: a page has been stored."""
        if self.refusal:
            self.refusal = ""
            logger.info("%s: sets are stored again", self._driver_name)


class DamagedPages(ForkAware):
    """Keys of damaged pages, which lookups do not find until they are set again (rule GET-7)."""

    def __init__(self) -> None:
        # Read without the lock: a membership test is atomic.
        self._pages: OrderedDict[tuple[str, str], None] = OrderedDict()
        super().__init__()

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __contains__(self, page: object) -> bool:
        """Return whether a page, given by the name of its namespace and its key, is damaged."""
        return page in self._pages

    def remember(self, namespace: Namespace, keys: Sequence[str]) -> None:
        """Add pages; the oldest of too many are forgotten."""
        with self._lock:
            for key in keys:
                self._pages[namespace.name, key] = None
            while len(self._pages) > MAX_REMEMBERED_DAMAGE:
                self._pages.popitem(last=False)

    def forget(self, namespace: Namespace, keys: Sequence[str]) -> None:
        """Remove pages that were stored again, or of which nothing is left."""
        if self._pages:
            with self._lock:
                for key in keys:
                    self._pages.pop((namespace.name, key), None)

    def clear(self) -> None:
        """Remove all pages."""
        with self._lock:
            self._pages.clear()

    def hide(self, batches: Sequence[LookupBatch], found: Sequence[list[bool]]) -> None:
        """Take the pages out of the answer of a lookup."""
        if not self._pages:
            return
        for batch, present in zip(batches, found, strict=True):
            name = batch.namespace.name
            present[:] = [
                exists and (name, key) not in self._pages
                for exists, key in zip(present, batch.keys, strict=True)
            ]
