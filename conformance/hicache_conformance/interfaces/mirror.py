"""Memory of an engine that stands in for a pool of a case, page for page."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from hicache_conformance.harness.page_patterns import spent
from hicache_conformance.harness.pools import spread

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from hicache_storage.spec import HostPool

IDLE_MARK: Final = b"\xc5IDLE..\xc5"


class EngineMemory(Protocol):
    """The engine's side: memory that drivers read from and write to, a page at a time."""

    def content(self, page: int) -> bytes:
        """The bytes of a page."""
        ...

    def put(self, page: int, content: bytes) -> None:
        """Replace the bytes of a page."""
        ...


class Mirror:
    """Carries pages between the two, at the suite's side of the driver.

    A page that no call has borrowed holds a mark; where a read has replaced it, the case is shown
    what stands there now, so that it sees a touched neighbour as it would in a pool of its own.
    """

    def __init__(self, source: HostPool, memory: EngineMemory) -> None:
        self.source = source
        self._memory = memory
        self._slots = source.geometry.page_size
        self._pages = source.geometry.size // self._slots
        self._idle = (IDLE_MARK * (source.geometry.page_bytes // len(IDLE_MARK) + 1))[
            : source.geometry.page_bytes
        ]
        # Counted, because two calls may use one page at the same time; the mark comes back with the
        # last of them.
        self._borrowed = Counter[int]()
        # Guards `_borrowed` and the bytes of both pools. It is not held while the driver works,
        # since calls of several threads have to overlap.
        self._lock = threading.Lock()
        for page in range(self._pages):
            memory.put(page, self._idle)

    def pages(self, host_indices: torch.Tensor) -> list[int]:
        """The pages that a transfer of the case's names."""
        return [int(slot) // self._slots for slot in host_indices[:: self._slots]]

    @contextmanager
    def sources(self, pages: Sequence[int]) -> Generator[None]:
        """Pages that a set reads.

        Their host pages are used for something else as soon as it has returned.
        """
        self._borrow(pages)
        try:
            yield
        finally:
            self._give_back(pages, spent(len(self._idle)))

    @contextmanager
    def destinations(self, pages: Sequence[int]) -> Generator[None]:
        """Pages that a get writes; afterwards the case has what they hold."""
        self._borrow(pages)
        try:
            yield
        finally:
            # All that was borrowed is carried back, pages that were missed included: what a missed
            # destination holds is nobody's business (GET-2).
            with self._lock:
                for page in pages:
                    self._write_source(page, self._memory.content(page))
                self._show_touched()
            self._give_back(pages, self._idle)

    def _borrow(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._borrowed.update(pages)
            for page in pages:
                self._memory.put(page, self._read_source(page))

    def _show_touched(self) -> None:
        for page in range(self._pages):
            if self._borrowed[page]:
                continue
            found = self._memory.content(page)
            if found not in (self._idle, spent(len(self._idle))):
                self._write_source(page, found)
                self._memory.put(page, self._idle)

    def _give_back(self, pages: Sequence[int], content: bytes) -> None:
        with self._lock:
            self._borrowed.subtract(pages)
            for page in pages:
                if not self._borrowed[page]:
                    self._memory.put(page, content)

    def _read_source(self, page: int) -> bytes:
        return b"".join(
            bytes(buffer) for buffer in self.source.page_buffers([page * self._slots])[0]
        )

    def _write_source(self, page: int, content: bytes) -> None:
        spread(content, self.source.page_buffers([page * self._slots])[0])
