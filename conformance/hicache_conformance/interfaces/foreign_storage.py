"""`ForeignStorage`: what the adapters of all interfaces have in common."""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import sys
import threading
from abc import abstractmethod
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from hicache_conformance.harness.pools import GuardedPool, LentMemory, slots_of, spent
from hicache_conformance.interfaces.interface import Setup, capabilities, interface_profile
from hicache_conformance.model.case import NotPromised
from hicache_storage.spec import (
    Capabilities,
    ConfigError,
    DriverConfig,
    DriverUnavailableError,
    Health,
    HiCacheStorage,
    HostPool,
    PageGeometry,
    PoolName,
    PoolTransfer,
    StorageClosedError,
    StorageIdentity,
    StorageStats,
    UnknownPoolError,
)
from hicache_storage.spec.config import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence

    import torch

    from hicache_conformance.harness.corruption import ObjectCorruption


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
        self._source = LentMemory(source)
        self._memory = memory
        length = self._source.page_bytes
        self._idle = (IDLE_MARK * (length // len(IDLE_MARK) + 1))[:length]
        # Counted, because two calls may use one page at the same time; the mark comes back with the
        # last of them.
        self._borrowed = Counter[int]()
        # Guards `_borrowed` and the bytes of both pools. It is not held while the driver works,
        # since calls of several threads have to overlap.
        self._lock = threading.Lock()
        for page in range(self._source.pages):
            memory.put(page, self._idle)

    def pages(self, host_indices: torch.Tensor) -> list[int]:
        """The pages that a transfer of the case's names."""
        slots = self._source.page_size
        return [int(slot) // slots for slot in host_indices[::slots]]

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
                    self._source.write(page, self._memory.content(page))
                self._show_touched()
            self._give_back(pages, self._idle)

    def _borrow(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._borrowed.update(pages)
            for page in pages:
                self._memory.put(page, self._source.read(page))

    def _show_touched(self) -> None:
        for page in range(self._source.pages):
            if self._borrowed[page]:
                continue
            found = self._memory.content(page)
            if found not in (self._idle, spent(len(self._idle))):
                self._source.write(page, found)
                self._memory.put(page, self._idle)

    def _give_back(self, pages: Sequence[int], content: bytes) -> None:
        with self._lock:
            self._borrowed.subtract(pages)
            for page in pages:
                if not self._borrowed[page]:
                    self._memory.put(page, content)


KeyT = TypeVar("KeyT", bound="Hashable")
logger = logging.getLogger(__name__)


def load_class(target: str) -> type:
    """Import `module:Class`; the module may lie in the current directory.

    Raises:
        DriverUnavailableError: it cannot be imported, or is no class.
    """
    module, _, name = target.partition(":")
    # At the end of the path, so that a file there does not hide an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DriverUnavailableError(f"cannot import {target}: {error}") from error
    if not isinstance(found, type):
        raise DriverUnavailableError(f"{target} is not a class")
    return found


def plain_options(setup: Setup, options: Mapping[str, object]) -> dict[str, Any]:
    """Options as the engine would have read them: JSON where they are JSON, sizes, else text.

    Raises:
        ValueError: a size is none.
    """
    plain = dict[str, Any]()
    for name, value in options.items():
        if name in setup.sizes and value is not None:
            plain[name] = parse_bytes(str(value))
        elif isinstance(value, str):
            plain[name] = value
            with suppress(ValueError):
                # The engine's own command line takes `extra_config` as JSON, so that `true` and `3`
                # arrive as such.
                plain[name] = json.loads(value)
        elif value is not None:
            plain[name] = value
    return plain


_lingering: Final = list[tuple[object, list[object]]]()
"""Closed drivers whose end is left to the end of the process, which comes at once, and the memory that
they have registered."""


def linger(driver: object, memory: list[object]) -> None:
    """Keep a closed driver, and the memory that it has registered."""
    if not _lingering:
        atexit.register(_leave_at_once)
    _lingering.append((driver, memory))


def process_is_full() -> bool:
    """Return whether too many closed drivers linger in this process.

    The run should go on in another.
    """
    return len(_lingering) > interface_profile().setup.max_lingering


def _leave_at_once() -> None:
    # Flushed by hand, because `os._exit` runs no handlers.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class ForeignStorage(HiCacheStorage):
    """One engine with a foreign driver attached.

    The driver is constructed when the initial pools are complete, because it is told of them;
    without any, `open()` gives it a small KV pool.
    """

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        profile = interface_profile()
        if profile.is_native:
            raise ConfigError("there is a foreign driver only in a run that names one")
        self._identity = identity
        self._setup = setup = profile.setup
        self._config = config
        self._options = plain_options(setup, msgspec.structs.asdict(config))
        capacity = self._options.get(setup.capacity_option)
        usual = plain_options(setup, setup.options).get(setup.capacity_option)
        self._capped = capacity is not None and capacity != usual
        self._pools: dict[str, HostPool] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._driver: Any = None
        self._closed = False
        self._companions = list[ForeignStorage]()
        # Guards the construction of the driver. Reentrant, because a pool that is registered
        # meanwhile attaches by itself.
        self._attaching = threading.RLock()

    # For each interface
    # ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _attach(self) -> Any:
        """Construct the driver, as the engine does."""

    @abstractmethod
    def _detach(self, driver: Any) -> None:
        """Let go of the driver, as the engine does."""

    @abstractmethod
    def corrupt(self, pool: str, key: str, damage: ObjectCorruption) -> bool:
        """Put a damaged page in the place of a page below the driver.

        `False` where that is not possible.
        """

    def can_corrupt(self) -> bool:
        """Return whether `corrupt` may succeed."""
        return True

    # For all
    # ----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> StorageIdentity:
        """Identity of the pages that are read and written."""
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities by the driver's setup."""
        return capabilities(self._setup, clears=self._setup.clears, evicts=self._capped)

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Make memory of the engine's for it."""
        self._check_open()
        if not isinstance(host_pool, HostPool):
            raise NotPromised(f"{type(host_pool).__name__} is not a pool of the engine's")
        with self._attaching:
            self._add_pool(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Construct the driver, if there is a pool for it."""
        if self._pools:
            self._attached()

    def open(self) -> None:
        """Construct the driver; idempotent."""
        self._attached()

    def close(self) -> None:
        """Detach as the engine does: what the driver raises is logged there and goes no further."""
        with self._attaching:
            driver = self._driver
            self._driver = None
            self._closed = True
        for companion in self._companions:
            companion.close()
        if driver is None:
            return
        try:
            self._detach(driver)
        except Exception:
            logger.exception("closing the driver failed")

    def get_stats(self) -> StorageStats:
        """Nothing: what the interface counts has other names and is drained by asking."""
        return StorageStats(driver=self._setup.name, verifies_checksums=False)

    def health(self) -> Health:
        """The interface has no such question; it serves while it is not closed."""
        return Health(not self._closed)

    def _add_pool(self, name: str, pool: HostPool) -> None:
        """Note a pool; one that comes after the others reaches the driver at once."""
        self._pools[name] = pool

    def _stored_by_another(
        self, identity: StorageIdentity, pools: Mapping[str, GuardedPool], pool: str, key: str
    ) -> bool:
        """Let another engine store the first page of a pool of its own; whether it was stored."""
        # Closed with this one: some stores keep pages no longer than their writer.
        self._companions.append(engine := type(self)(identity, self._config))
        for name, memory in pools.items():
            engine.register_mem_host_pool_v2(memory, name)
        transfer = PoolTransfer(PoolName(pool), slots_of([0], pools[pool].page_size), keys=[key])
        return engine.batch_set_v2([transfer]) == {PoolName(pool): [True]}

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosedError("the storage is closed")

    def _attached(self) -> Any:
        self._check_open()
        if self._driver is None:
            with self._attaching:
                if self._driver is None:
                    if not self._pools:
                        self._add_pool(PoolName.KV, GuardedPool(pages=8))
                    self._driver = self._attach()
        return self._driver

    def _shares(self, transfers: Sequence[PoolTransfer]) -> list[tuple[int, PoolTransfer]]:
        """The transfers that move something, with the indices that they borrow filled in."""
        by_pool = {transfer.name: transfer for transfer in transfers}
        shares = list[tuple[int, PoolTransfer]]()
        for index, transfer in enumerate(transfers):
            if transfer.name not in self._pools:
                raise UnknownPoolError(f"pool {transfer.name!r} was never registered")
            lender = by_pool[transfer.indices_from_pool] if transfer.indices_from_pool else transfer
            keys = transfer.keys if transfer.keys is not None else lender.keys
            if keys:
                indices = (
                    transfer.host_indices
                    if transfer.host_indices is not None
                    else lender.host_indices
                )
                shares.append((index, PoolTransfer(transfer.name, indices, keys=list(keys))))
        return shares


def element_type(geometry: PageGeometry, identity: StorageIdentity) -> str:
    """Name of the type of a page's elements; that of the identity where a case left it open."""
    return geometry.dtype if geometry.dtype != "uint8" else identity.kv_dtype


def torch_type(name: str) -> torch.dtype:
    """The type of elements of a name; bytes for what PyTorch does not have, or cases cannot fill."""
    import torch

    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else torch.uint8


def rounds(items: Iterable[tuple[int, KeyT]]) -> list[dict[KeyT, int]]:
    """Numbers by key, in as few rounds as may be: of two with one key, the second comes later."""
    found = list[dict[KeyT, int]]()
    for number, key in items:
        free = next((each for each in found if key not in each), None)
        if free is None:
            found.append(free := {})
        free[key] = number
    return found


def joined(
    transfers: Sequence[PoolTransfer], answers: Mapping[int, list[bool]]
) -> dict[PoolName, list[bool]]:
    """Return the answer for each pool, of the answers for each transfer by its index."""
    by_pool = dict[PoolName, list[bool]]()
    for index, transfer in enumerate(transfers):
        by_pool.setdefault(transfer.name, []).extend(answers.get(index, []))
    return by_pool
