"""Right drivers of several servers, and drivers with one planted fault each."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash
from drivers_networked import ACROSS, Networked, NetworkedConfig, _joined, _split

from hicache_storage.objects import Call, ObjectStorage
from hicache_storage.spec import (
    Capabilities,
    DriverConfig,
    Durability,
    StorageTimeoutError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.objects import LookupBatch, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity

SPREAD = replace(ACROSS, deletes=False, clears=False)
VOLATILE = replace(SPREAD, durability=Durability.REOPEN)
REQUEST_SECONDS = 0.4
REST_SECONDS = 1.0
"""How long a server that has failed is left out."""
FAULTS = (OSError, StorageUnavailableError, StorageTimeoutError)


class SpreadConfig(DriverConfig, frozen=True, kw_only=True):
    ports: str


class Member(Networked):
    """A client of one server."""

    def seconds(self, call: Call) -> float | None:
        return call.timeout(REQUEST_SECONDS)


class Spread(ObjectStorage):
    """Keeps each page on one of several servers, chosen by its name.

    A server that has failed is left out for a while: its pages are misses at once, and then one
    call asks it again.
    """

    promises: ClassVar[Capabilities] = SPREAD
    member: ClassVar[type[Networked]] = Member
    threads: ClassVar[int] = 64

    def __init__(self, identity: StorageIdentity, config: SpreadConfig) -> None:
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        self.members = [
            self.member(identity, NetworkedConfig(port=port)) for port in config.ports.split(",")
        ]
        self.lock = threading.Lock()
        self.left_out = dict[int, float]()
        self.pool = ThreadPoolExecutor(self.threads)

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def homes(self, name: str) -> list[int]:
        """Servers that may have a page, in the order in which they are asked."""
        return [xxhash.xxh32_intdigest(name.encode()) % len(self.members)]

    def may_ask(self, home: int) -> bool:
        """Return whether a server is not left out; one that was is asked by one call."""
        now = time.monotonic()
        with self.lock:
            if now < self.left_out.get(home, now):
                return False
            if home in self.left_out:
                self.left_out[home] = now + REST_SECONDS
            return True

    def note(self, faults: Sequence[Exception], answers: Sequence[Any]) -> None:
        self.note_partial_faults(faults, served=any(answers))

    def ask(self, home: int, question: Callable[[Networked], list[Any]]) -> list[Any]:
        try:
            answers = question(self.members[home])
        except FAULTS:
            with self.lock:
                self.left_out[home] = time.monotonic() + REST_SECONDS
            raise
        with self.lock:
            self.left_out.pop(home, None)
        return answers

    def gather(
        self, names: Sequence[str], question: Callable[[list[int], Networked], list[Any]]
    ) -> list[Any]:
        """What the servers answer about pages, each asked once; None where none has an answer."""
        answers: list[Any] = [None] * len(names)
        faults = list[Exception]()
        for turn in range(max((len(self.homes(name)) for name in names), default=0)):
            shares = dict[int, list[int]]()
            for number, name in enumerate(names):
                if not answers[number]:
                    shares.setdefault(self.homes(name)[turn], []).append(number)
            jobs = {
                home: self.pool.submit(self.ask, home, partial(question, numbers))
                for home, numbers in shares.items()
                if self.may_ask(home)
            }
            for home, job in jobs.items():
                try:
                    for number, answer in zip(shares[home], job.result(), strict=True):
                        answers[number] = answer
                except FAULTS as fault:
                    faults.append(fault)
        self.note(faults, answers)
        return answers

    # The driver
    # --------------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        for member in self.members:
            member.disconnect()
        self.pool.shutdown()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        names = [[self.name(batch, key) for key in batch.keys] for batch in batches]
        return _split(self.exist(_joined(names), call), names)

    def exist(self, names: list[str], call: Call) -> list[bool]:
        def question(numbers: list[int], member: Networked) -> list[bool]:
            return member.asked(call, "exists", [names[number] for number in numbers])

        return [bool(answer) for answer in self.gather(names, question)]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        names = [[self.name(batch, read.key) for read in batch.reads] for batch in batches]
        pages = _split(self.read(_joined(names), call), names)
        return [
            [
                page is not None and read.fill(page)
                for read, page in zip(batch.reads, some, strict=True)
            ]
            for batch, some in zip(batches, pages, strict=True)
        ]

    def read(self, names: list[str], call: Call) -> list[bytes | None]:
        def question(numbers: list[int], member: Networked) -> list[bytes | None]:
            return member.asked(call, "get", [names[number] for number in numbers])

        return self.gather(names, question)

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        writes = [
            [(self.name(batch, write.key), write) for write in batch.writes] for batch in batches
        ]
        pages = [(name, write.tobytes()) for name, write in _joined(writes)]
        replaces = [name for name, write in _joined(writes) if write.replaces]
        if call.expired():
            raise StorageTimeoutError("too late to store anything")

        def question(numbers: list[int], member: Networked) -> list[bool]:
            return member.asked(call, "put", [pages[number] for number in numbers], replaces)

        stored = self.gather([name for name, _ in pages], question)
        return _split([bool(answer) for answer in stored], writes)

    def name(self, batch: LookupBatch | ReadBatch | WriteBatch, key: str) -> str:
        return self.members[0].name(batch.namespace, key)


class FillsUp(Spread):
    """Stores pages on the first server that takes them, and looks for them on all.

    The servers keep nothing on a disk.
    """

    promises = VOLATILE

    def homes(self, name: str) -> list[int]:
        return list(range(len(self.members)))


class OneServerFailsAll(Spread):
    """Fails a batch if one of its servers fails or is left out."""

    def may_ask(self, home: int) -> bool:
        if not super().may_ask(home):
            raise StorageUnavailableError(f"server {home} does not answer")
        return True

    def note(self, faults: Sequence[Exception], answers: Sequence[Any]) -> None:
        if faults:
            raise faults[0]


class Unhurried(Networked):
    """Waits for its server for as long as it takes."""

    def seconds(self, call: Call) -> float | None:
        return 60.0


class OneServerHasAllThreads(Spread):
    """Shares eight threads among all servers, and waits for each for as long as it takes."""

    member = Unhurried
    threads = 8


class HoldsNamesToTheEnd(Spread):
    """Reads no page that another call of the process is reading, also if its caller has left."""

    member = Unhurried
    held: ClassVar[dict[str, object]] = {}

    def read(self, names: list[str], call: Call) -> list[bytes | None]:
        # The first call that names a page holds it; `setdefault` is atomic.
        free = [name for name in dict.fromkeys(names) if self.held.setdefault(name, call) is call]
        try:
            found = dict(zip(free, super().read(free, call), strict=True))
        finally:
            for name in free:
                del self.held[name]
        return [found.get(name) for name in names]


class TakesListedForStored(Spread):
    """Takes each page for stored that it has once stored or seen, whatever became of its server.

    The servers keep nothing on a disk.
    """

    promises = VOLATILE

    def __init__(self, identity: StorageIdentity, config: SpreadConfig) -> None:
        super().__init__(identity, config)
        self.listed = set[str]()

    def exist(self, names: list[str], call: Call) -> list[bool]:
        unknown = [name for name in names if name not in self.listed]
        found = super().exist(unknown, call) if unknown else []
        self.listed.update(name for name, there in zip(unknown, found, strict=True) if there)
        return [name in self.listed for name in names]

    def read(self, names: list[str], call: Call) -> list[bytes | None]:
        pages = super().read(names, call)
        self.listed.update(name for name, page in zip(names, pages, strict=True) if page)
        return pages
