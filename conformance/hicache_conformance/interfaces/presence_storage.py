"""`PresenceStorage`: adapters of interfaces that ask for each page whether it is there.

The engine itself decides which prefix can be restored, so the answers of `batch_exists_v2` are made
here, of the presence of each page. It calls its driver from a thread that does not wait for it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar, cast

from hicache_conformance.harness.corruption import ObjectCorruption, corrupt_page
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.interfaces.foreign_storage import (
    ForeignStorage,
    Mirror,
    joined,
    load_class,
    rounds,
)
from hicache_conformance.interfaces.interface import PATIENCE_SECONDS
from hicache_conformance.model.case import NotPromised, Violation
from hicache_storage.spec import (
    DriverConfig,
    HiCacheStorageExtraInfo,
    HostPool,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageIdentity,
)
from hicache_storage.spec.policies import PoolPresence, common_hit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence


class PageMemory:
    """Memory of the engine that has the pages of a pool.

    Args:
        places: what a job of the engine names the memory of each page by.
        view: the bytes of a page at a place.
    """

    def __init__(self, places: Sequence[Any], view: Callable[[Any], memoryview]) -> None:
        self.places = places
        self._view = view

    def content(self, page: int) -> bytes:
        """The bytes of a page."""
        return bytes(self._view(self.places[page]))

    def put(self, page: int, content: bytes) -> None:
        """Replace the bytes of a page."""
        self._view(self.places[page])[:] = content


class PresenceEngine(Protocol):
    """An engine with a driver attached; a key is the engine's own."""

    def look_up(self, keys: Sequence[Any], before: int) -> list[bool]:
        """Ask for each key whether it is there; `before` pages of the sequence come first."""
        ...

    def load(self, keys: Sequence[Any], places: Sequence[Any], before: int, /) -> list[bool]:
        """Look keys up, and load those that are there; whether each was loaded."""
        ...

    def store(self, keys: Sequence[Any], places: Sequence[Any], before: int, /) -> bool:
        """Store pages, all or none."""
        ...

    def close(self) -> None:
        """Let go of the driver, and of the memory."""
        ...


class Page(NamedTuple):
    """A page of a call."""

    pool: str
    key: bytes
    number: int
    """Page of the pool that it is read from, or written to."""


class PresenceStorage(ForeignStorage):
    """An engine that finds out which pages are there, and then loads those."""

    hashed: ClassVar[tuple[str, ...]]
    """Fields of the identity that the engine hashes into each key."""
    one_rank_stores: ClassVar[bool]
    """Whether the engine does not ask a rank to store that is not the writer."""

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        super().__init__(identity, config)
        self._groups: dict[str, int] = {}
        """Number of each pool, KV first: it is a group of every model."""
        self._memories: Mapping[str, PageMemory] = {}
        self._seed = repr([getattr(identity, name) for name in self.hashed]).encode()

    # For each interface
    # ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> tuple[PresenceEngine, Mapping[str, PageMemory]]:
        """Start the engine, which constructs the driver, and make memory for each pool."""

    @abstractmethod
    def _plugin(self, module: str, name: str) -> dict[str, Any]:
        """The engine's configuration of a dynamically loaded class."""

    @abstractmethod
    def _key(self, pool: str, key: bytes) -> Any:
        """A key as the engine has it."""

    # For all
    # ----------------------------------------------------------------------------------------------

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Ask for each page; a pool that is not there is not asked for."""
        engine: PresenceEngine = self._attached()
        if not keys or pool not in self._pools:
            return [False] * len(keys)
        named = [self._key(pool, key) for key in self._digests(keys)]
        return engine.look_up(named, _before(extra_info))

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Ask for each page of each pool, and decide as the contract says."""
        found = self.batch_present(keys, extra_info=extra_info)
        return common_hit(
            found,
            [
                PoolPresence.of(
                    transfer, self.batch_present(keys, pool=transfer.name, extra_info=extra_info)
                )
                for transfer in pool_transfers or ()
            ],
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        """Look up and load the pages of all pools together."""
        return self._move(transfers, extra_info, writes=False)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        """Store the pages of all pools together."""
        return self._move(transfers, extra_info, writes=True)

    def can_corrupt(self) -> bool:
        """Return whether an option names a directory, whose files can be damaged."""
        return any(_paths(self._options))

    def corrupt(self, pool: str, key: str, damage: ObjectCorruption) -> bool:
        """Let an engine of equal identity store a page, and damage the file that has its bytes.

        `False` where no file has the page as it is.
        """
        other_key, other = key, self._identity
        if damage is ObjectCorruption.OTHER_KEY:
            other_key = f"{key}'"
        if damage is ObjectCorruption.OTHER_IDENTITY:
            # Every interface tells its drivers the model.
            other = replace(other, model=f"{other.model}-2")
        page = self._planted(self._identity, pool, key)
        stranger = page
        if (other_key, other) != (key, self._identity):
            stranger = self._planted(other, pool, other_key)
        if not (page and stranger):
            return False
        damaged = False
        for directory in _paths(self._options):
            damaged |= directory.is_dir() and corrupt_page(directory, page, stranger, damage)
        return damaged

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _attach(self) -> PresenceEngine:
        names = {PoolName.KV: None} | dict.fromkeys(sorted(self._pools))
        self._groups = {str(name): group for group, name in enumerate(names)}
        engine, self._memories = self._start()
        for name, pool in self._pools.items():
            self._mirrors[name] = Mirror(pool, self._memories[name])
        return engine

    def _detach(self, driver: PresenceEngine) -> None:
        driver.close()

    def _entry(self) -> dict[str, Any]:
        """The engine's configuration of the driver."""
        if not self._setup.target:
            return {"type": self._setup.backend, **self._options}
        # Here, because engines report what cannot be imported less clearly.
        load_class(self._setup.target)
        module, _, name = self._setup.target.partition(":")
        return self._plugin(module, name)

    def _add_pool(self, name: str, pool: HostPool) -> None:
        if self._driver is not None:
            raise NotPromised("the engine knows its pools before it constructs the driver")
        super()._add_pool(name, pool)

    def _planted(self, identity: StorageIdentity, pool: str, key: str) -> bytes:
        """Store a page through an engine of its own; its bytes, empty if it was not stored."""
        pools = {
            name: GuardedPool(
                pages=1,
                page_size=each.geometry.page_size,
                components=each.geometry.component_bytes,
                exact=True,
                layout=each.geometry.layout,
                dtype=each.geometry.dtype,
            )
            # All of them, because drivers are told of all.
            for name, each in self._pools.items()
        }
        # Of nobody else, so that a file that has them has this page.
        content = hashlib.shake_256(repr((identity, pool, key)).encode()).digest(
            pools[pool].page_bytes
        )
        pools[pool].write(0, content)
        return content if self._stored_by_another(identity, pools, pool, key) else b""

    def _move(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        *,
        writes: bool,
    ) -> dict[PoolName, list[bool]]:
        self._attached()
        pages = list[Page]()
        with ExitStack() as lent:
            for _, transfer in (shares := self._shares(transfers)):
                assert transfer.host_indices is not None
                mirror = self._mirrors[transfer.name]
                numbers = mirror.pages(transfer.host_indices)
                lent.enter_context(
                    mirror.sources(numbers) if writes else mirror.destinations(numbers)
                )
                digests = self._digests(transfer.keys or ())
                pages += [
                    Page(transfer.name, key, number)
                    for key, number in zip(digests, numbers, strict=True)
                ]
            found = iter(self._call(pages, _before(extra_info), writes=writes))
        answers = {index: [next(found) for _ in transfer.keys or ()] for index, transfer in shares}
        return joined(transfers, answers)

    def _call(self, pages: Sequence[Page], before: int, *, writes: bool) -> list[bool]:
        """Store or load pages; those that a call has twice one after the other.

        The engine has no two places for a page.
        """
        answers = [False] * len(pages)
        for each in rounds(enumerate((page.pool, page.key) for page in pages)):
            found = self._transfer([pages[index] for index in each.values()], before, writes=writes)
            for index, answer in zip(each.values(), found, strict=True):
                answers[index] = answer
        return answers

    def _transfer(self, pages: Sequence[Page], before: int, *, writes: bool) -> list[bool]:
        engine: PresenceEngine = self._attached()
        keys = [self._key(page.pool, page.key) for page in pages]
        places = [self._memories[page.pool].places[page.number] for page in pages]
        if not writes:
            return engine.load(keys, places, before)
        if self.one_rank_stores and not self._identity.is_writer(PoolName.KV):
            return engine.look_up(keys, before)
        return [engine.store(keys, places, before)] * len(pages)

    def _digests(self, keys: Iterable[str]) -> list[bytes]:
        """Keys as the engine has them: digests of 32 bytes."""
        return [hashlib.sha256(self._seed + key.encode()).digest() for key in keys]


def _before(extra_info: HiCacheStorageExtraInfo | None) -> int:
    """The pages of a sequence that come before those of a call."""
    return len((extra_info.prefix_keys if extra_info else None) or ())


def _paths(value: object) -> Iterator[Path]:
    """The paths that options name, however deep; a driver makes its directory when it is attached."""
    match value:
        case str() if value.startswith("/"):
            yield Path(value)
        case dict():
            for each in cast("dict[object, object]", value).values():
                yield from _paths(each)
        case list():
            for each in cast("list[object]", value):
                yield from _paths(each)
        case _:
            pass


AnswerT = TypeVar("AnswerT")

START_SECONDS: Final = 60.0
"""How long one may take to be constructed, while an engine loads its model."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the suite, made in steps."""

    steps: Generator[str, None, Any]
    answer: Future[Any]
    patience: float
    deadline: float


class EngineThread:
    """A loop that makes all calls of a driver in one thread, as an engine's scheduler does.

    A call of the suite is a generator. It is resumed once in each turn of the loop until it returns,
    and yields what it waits for; so calls of several threads of the suite are under way at a time,
    and none of them waits inside the driver.

    Args:
        end_turn: called behind each turn, in the thread; may wait a little for the driver.
    """

    def __init__(self, name: str, end_turn: Callable[[], None] = lambda: None) -> None:
        self._end_turn = end_turn
        # Guards `_fresh` and `_closed`.
        self._changed = threading.Condition()
        self._fresh = list[_Call]()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(
        self, steps: Generator[str, None, AnswerT], *, patience: float = PATIENCE_SECONDS
    ) -> AnswerT:
        """Make a call and wait for its answer.

        Args:
            patience: seconds that it may take.

        Raises:
            Violation: FT-3, the driver has not answered in time.
        """
        call = _Call(steps, Future(), patience, time.monotonic() + patience)
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine has ended")
            self._fresh.append(call)
            self._changed.notify()
        try:
            # Longer than the deadline, which the thread itself looks at in each turn.
            answer: AnswerT = call.answer.result(patience + 1)
        except TimeoutError:
            raise Violation(
                "FT-3",
                f"a call of the driver keeps the engine's thread for more than "
                f"{patience:g} s; nothing else is served meanwhile",
            ) from None
        return answer

    def do(self, call: Callable[[], AnswerT], *, patience: float = PATIENCE_SECONDS) -> AnswerT:
        """Call a function in the thread."""

        return self.run(_at_once(call), patience=patience)

    def close(self) -> None:
        """End the thread; one that the driver keeps is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(PATIENCE_SECONDS)

    def _loop(self) -> None:
        calls = list[_Call]()
        while True:
            with self._changed:
                if not calls:
                    self._changed.wait_for(lambda: self._fresh or self._closed)
                calls += self._fresh
                self._fresh.clear()
                if self._closed and not calls:
                    return
            calls = [call for call in calls if not _resumed(call)]
            try:
                if calls:
                    self._end_turn()
            except Exception as error:  # noqa: BLE001 - whatever a driver raises here ends the engine, and each call that waits
                for call in calls:
                    call.answer.set_exception(error)
                calls = []


def _resumed(call: _Call) -> bool:
    """Resume a call; return whether it has ended."""
    try:
        waits_for = next(call.steps)
        if time.monotonic() > call.deadline:
            raise Violation(
                "FT-3",
                f"{waits_for} for {call.patience:g} s; the engine has no limit, and waits for ever",
            )
    except StopIteration as end:
        call.answer.set_result(end.value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again in the thread of the suite
        call.answer.set_exception(error)
    else:
        return False
    return True


def _at_once(call: Callable[[], AnswerT]) -> Generator[str, None, AnswerT]:
    """A call that waits for nothing."""
    yield from ()
    return call()
