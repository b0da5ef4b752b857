"""`EngineStorage`: adapts a driver with SGLang's interface to the contract.

It calls the driver as SGLang's cache controller does.

KV goes in batches of 128 pages through `batch_get_v1` and `batch_set_v1`, or through copies in
`batch_get` and `batch_set`; side pools through `batch_get_v2` and `batch_set_v2`, before KV in a
set and after it in a get. At most one lookup, one read and one write run at a time. What a call
raises is a miss where the controller catches it, and raised on where it does not.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.interfaces.sglang.engine import (
    clears,
    construct,
    environment,
    has_sglang,
    namespace_suffix,
    storage_config,
    types,
)
from hicache_conformance.interfaces.sglang.mirror import Mirror
from hicache_conformance.interfaces.sglang.options import plain_options
from hicache_conformance.interfaces.sglang.setup import KEY_BYTES, current
from hicache_conformance.model.violation import NotPromised
from hicache_storage.spec import (
    Capabilities,
    ConfigError,
    Health,
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageClosedError,
    StorageStats,
    UnknownPoolError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.spec import (
        DriverConfig,
        HiCacheStorageExtraInfo,
        PageGeometry,
        StorageIdentity,
    )

logger = logging.getLogger(__name__)

BATCH_PAGES: Final = 128
"""SGLang's `STORAGE_BATCH_SIZE`."""


class _Lingering:
    """Closed drivers whose end is left to the end of the process, which comes at once."""

    def __init__(self) -> None:
        self._kept = list[tuple[object, list[object]]]()

    def keep(self, driver: object, pools: list[object]) -> None:
        """Keep a driver, and the memory that it has registered."""
        if not self._kept:
            atexit.register(_leave_at_once)
        self._kept.append((driver, pools))

    def __len__(self) -> int:
        return len(self._kept)


_lingering: Final = _Lingering()


def process_is_full() -> bool:
    """Return whether too many closed drivers linger in this process.

    The run should go on in another.
    """
    setup = current()
    return setup is not None and len(_lingering) > setup.max_lingering


def _first_rank(salt: str, options: Mapping[str, Any]) -> int:
    """A rank that no storage of another case, or with other options, has.

    Args:
        salt: of the identity; all that a case compares with each other have the same.
        options: of the driver.
    """
    text = repr((salt, sorted(options.items()))).encode()
    # Far apart, because the ranks of one case are counted from here.
    return 1000 * (1 + int.from_bytes(hashlib.blake2b(text, digest_size=3).digest(), "big"))


def _leave_at_once() -> None:
    # Flushed by hand, because `os._exit` runs no handlers.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class EngineStorage(HiCacheStorage):
    """One rank of the engine with the driver attached.

    The driver is constructed when the initial pools are complete, because it is told of them;
    without any, `open()` gives it a small KV pool.
    """

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        setup = current()
        if setup is None:
            raise ConfigError("there is a foreign driver only in a run that names one")
        self._identity = identity
        self._setup = setup
        self._config = config
        self._options = plain_options(setup, msgspec.structs.asdict(config))
        self._suffix = namespace_suffix(identity)
        capacity = self._options.get(setup.capacity_option)
        self._capped = capacity is not None and capacity != plain_options(setup, setup.options).get(
            setup.capacity_option
        )
        self._mirrors: dict[str, Mirror] = {}
        self._driver: Any = None
        self._closed = False
        self._companions = list[EngineStorage]()
        # Guards the construction of the driver. Reentrant, because a pool that is registered
        # meanwhile attaches by itself.
        self._attaching = threading.RLock()
        # One lock for each of the three threads that the engine calls its driver from: calls of one
        # kind never overlap there, calls of different kinds do.
        self._looking = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        promises_clear = clears(setup) if setup.target else setup.clears
        self._capabilities = Capabilities(
            sharing=setup.sharing,
            durability=setup.durability,
            clears=promises_clear,
            evicts=self._capped,
            networked=setup.networked,
            max_key_bytes=KEY_BYTES,
        )

    @property
    def identity(self) -> StorageIdentity:
        """Identity of the pages that this rank reads and writes."""
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities by the driver's setup."""
        return self._capabilities

    @property
    def driver(self) -> Any:
        """The driver itself; None before it is constructed and after `close()`."""
        return self._driver

    def geometry(self, pool: str) -> PageGeometry:
        """Return the geometry of a registered pool."""
        return self._mirrors[pool].source.geometry

    def companion(self) -> EngineStorage:
        """Another rank of equal identity and options, closed with this one.

        Some stores keep pages no longer than their writer.
        """
        companion = EngineStorage(self._identity, self._config)
        self._companions.append(companion)
        return companion

    # Attaching and detaching
    # -------------------------------------------------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Make a pool of the engine's for it.

        One that comes after the others reaches the driver at once.
        """
        self._check_open()
        mirror = Mirror(host_pool_name, host_pool, self._identity, self._layout(host_pool))
        with self._attaching:
            self._mirrors[str(host_pool_name)] = mirror
            if self._driver is not None:
                self._register(self._driver, str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Construct the driver, if there is a pool for it."""
        if self._mirrors:
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
        # Kept alive, because its destructor would take seconds here; the memory that it has
        # registered has to live as long.
        if driver is not None and self._setup.max_lingering:
            _lingering.keep(driver, [mirror.pool for mirror in self._mirrors.values()])
            return
        if driver is None or not hasattr(driver, "close"):
            return
        try:
            driver.close()
        except Exception:
            logger.exception("closing the driver failed")

    def clear(self) -> None:
        """Clear as the engine does, when nothing else runs."""
        if not self._capabilities.clears:
            super().clear()
        driver = self._attached()
        with ExitStack() as quiet:
            # Always in this order. The data path takes one lock at a time, so that there is no
            # deadlock.
            for lock in (self._looking, self._reading, self._writing):
                quiet.enter_context(lock)
            try:
                driver.clear()
            except NotImplementedError as error:
                raise _not_implemented("clear", error) from error

    def get_stats(self) -> StorageStats:
        """Nothing: what the interface counts has other names and is drained by asking."""
        return StorageStats(driver=self._setup.name, verifies_checksums=False)

    def health(self) -> Health:
        """The interface has no such question; it serves while it is not closed."""
        return Health(not self._closed)

    # The data path
    # -----------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Ask in batches for KV alone, and for the whole chain at once with side pools."""
        driver, asked = self._attached(), list(pool_transfers or ())
        named = [self._key(key) for key in keys]
        with self._looking:
            if not asked:
                hit = self._prefix(driver, named, extra_info)
                return PoolTransferResult(hit, {PoolName.KV: hit}, list(range(1, hit + 1)))
            found = self._caught(
                "batch_exists_v2",
                lambda: driver.batch_exists_v2(
                    named, [_question(transfer) for transfer in asked], _extra(extra_info)
                ),
            )
        if found is None:
            return PoolTransferResult(
                0, {PoolName.KV: 0, **{transfer.name: 0 for transfer in asked}}
            )
        hit, told = (
            int(found.kv_hit_pages),
            {str.__str__(name): pages for name, pages in found.extra_pool_hit_pages.items()},
        )
        verdicts = {
            PoolName.KV: told.get("kv", hit),
            **{transfer.name: told.get(transfer.name, 0) for transfer in asked},
        }
        # Without a list, the engine takes every length up to the hit for restorable.
        legal = found.restorable_prefix_pages
        return PoolTransferResult(
            hit, verdicts, list(range(1, hit + 1)) if legal is None else sorted(legal)
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        """Read KV first and then the side pools."""
        driver, shares = self._attached(), self._shares(transfers)
        answers: dict[int, list[bool]] = {}
        with self._reading:
            for index, transfer in shares:
                if transfer.name == PoolName.KV:
                    answers[index] = self._in_batches(
                        transfer, lambda keys, pages: self._get_kv(driver, keys, pages, extra_info)
                    )
            for calls in _one_of_each(shares):
                answers |= self._move_side(driver.batch_get_v2, calls, extra_info, writes=False)
        return _joined(transfers, answers)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        """Write the side pools first and then KV."""
        driver, shares = self._attached(), self._shares(transfers)
        answers: dict[int, list[bool]] = {}
        with self._writing:
            for calls in _one_of_each(shares):
                answers |= self._move_side(driver.batch_set_v2, calls, extra_info, writes=True)
            for index, transfer in shares:
                if transfer.name == PoolName.KV:
                    answers[index] = self._in_batches(
                        transfer, lambda keys, pages: self._set_kv(driver, keys, pages, extra_info)
                    )
        return _joined(transfers, answers)

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosedError("the storage is closed")

    def _attached(self) -> Any:
        self._check_open()
        if self._driver is None:
            with self._attaching:
                if self._driver is None:
                    self._driver = self._attach()
        return self._driver

    def _attach(self) -> Any:
        if PoolName.KV not in self._mirrors:
            pool = GuardedPool(pages=8)
            self._mirrors[PoolName.KV] = Mirror(
                PoolName.KV, pool, self._identity, self._layout(pool)
            )
        kv = self._mirrors[PoolName.KV].pool
        for name in self._setup.directories:
            Path(str(self._options[name])).mkdir(parents=True, exist_ok=True)
        extra = {
            name: value
            for name, value in self._options.items()
            if name not in self._setup.config_keys and name not in self._setup.variables
        }
        # The driver divides by these, and each rank shall get what was written.
        for name in self._setup.divided:
            extra[name] *= self._identity.tp_size * self._identity.pp_size
        config = storage_config(self._identity, str(kv.layout), extra)
        # Of a model with latent attention, rank 0 is the one that writes.
        if self._setup.ranks_of_its_own and not self._identity.kv_replicated:
            config.tp_rank += _first_rank(self._identity.salt, self._options)
        variables = {
            variable: str(self._options[option])
            for option, variable in self._setup.variables.items()
        }
        if self._setup.config_variable:
            variables[self._setup.config_variable] = str(self._config_file())
        with environment(variables):
            driver = construct(self._setup, config, kv)
        driver.register_mem_pool_host(kv)
        if len(self._mirrors) > 1:
            for name in self._mirrors:
                self._register(driver, name)
        driver.on_host_pools_registered()
        time.sleep(self._setup.joining_seconds)
        return driver

    def _register(self, driver: Any, name: str) -> None:
        driver.register_mem_host_pool_v2(self._mirrors[name].pool, _engine_name(name))

    def _config_file(self) -> Path | None:
        """The configuration file of a driver that reads one, beside its store."""
        if not self._setup.config_variable:
            return None
        content = {
            name: self._options[name] for name in self._setup.config_keys if name in self._options
        }
        encoded = msgspec.json.encode(content)
        path = Path(str(self._options[self._setup.config_keys[0]])).with_name(
            f"config-{hashlib.blake2b(encoded, digest_size=4).hexdigest()}.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)
        return path

    def _layout(self, host_pool: object) -> str:
        """The layout that is asked for, where the driver serves it.

        Elsewhere another that is not the usual one.
        """
        asked = getattr(getattr(host_pool, "geometry", None), "layout", self._identity.layout)
        if asked == "page_first":
            asked = self._identity.layout
        served = self._setup.layouts
        return (
            asked
            if asked in served
            else served[0]
            if asked == "page_first" or len(served) == 1
            else served[1]
        )

    def _key(self, key: str) -> str:
        return key + self._suffix

    def _shares(self, transfers: Sequence[PoolTransfer]) -> list[tuple[int, PoolTransfer]]:
        """The transfers that move something, with the indices that they borrow filled in."""
        by_pool = {transfer.name: transfer for transfer in transfers}
        shares = list[tuple[int, PoolTransfer]]()
        for index, transfer in enumerate(transfers):
            if transfer.name not in self._mirrors:
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

    def _in_batches(
        self, transfer: PoolTransfer, move: Callable[[list[str], list[int]], list[bool]]
    ) -> list[bool]:
        keys, pages = self._placed(transfer)
        answers = list[bool]()
        for start in range(0, len(keys), BATCH_PAGES):
            answers += move(keys[start : start + BATCH_PAGES], pages[start : start + BATCH_PAGES])
        return answers

    def _placed(self, transfer: PoolTransfer) -> tuple[list[str], list[int]]:
        assert transfer.host_indices is not None
        keys = [self._key(key) for key in transfer.keys or ()]
        return keys, self._mirrors[transfer.name].pages(transfer.host_indices)

    def _prefix(
        self, driver: Any, keys: list[str], extra_info: HiCacheStorageExtraInfo | None
    ) -> int:
        hit = 0
        for start in range(0, len(keys), BATCH_PAGES):
            batch = keys[start : start + BATCH_PAGES]
            found = self._caught(
                "batch_exists",
                partial(_batch_exists, driver, batch, extra_info),
            )
            if found is None:
                return 0
            # Batch by batch until one is not there in full, as the engine's prefetch does.
            hit += found
            if found < len(batch):
                break
        return hit

    def _get_kv(
        self, driver: Any, keys: list[str], pages: list[int], extra: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        mirror = self._mirrors[PoolName.KV]
        with mirror.destinations(pages):
            if self._setup.zero_copy:
                indices = mirror.indices(pages)
                answer = self._caught(
                    "batch_get_v1",
                    lambda: _listed(
                        "batch_get_v1", driver.batch_get_v1(keys, indices, _extra(extra))
                    ),
                )
            else:
                answer = self._caught("batch_get", lambda: _get_copies(driver, mirror, keys, pages))
        return [False] * len(keys) if answer is None else answer

    def _set_kv(
        self, driver: Any, keys: list[str], pages: list[int], extra: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        if not self._identity.is_writer(PoolName.KV):
            # The engine does not ask a rank that is not the writer.
            return [self._prefix(driver, [key], extra) == 1 for key in keys]
        mirror = self._mirrors[PoolName.KV]
        with mirror.sources(pages):
            if self._setup.zero_copy:
                indices = mirror.indices(pages)
                done = self._caught(
                    "batch_set_v1",
                    lambda: all(
                        _listed("batch_set_v1", driver.batch_set_v1(keys, indices, _extra(extra)))
                    ),
                )
            else:
                size = int(mirror.pool.page_size)
                copies = [mirror.pool.get_data_page(page * size) for page in pages]
                done = self._caught("batch_set", lambda: bool(driver.batch_set(keys, copies)))
        # The engine takes a batch for stored, or not, as a whole.
        return [bool(done)] * len(keys)

    def _move_side(
        self,
        call: Callable[[list[Any], Any], Any],
        shares: Mapping[int, PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        *,
        writes: bool,
    ) -> dict[int, list[bool]]:
        asked = list[Any]()
        with ExitStack() as lent:
            for transfer in shares.values():
                mirror, (keys, pages) = self._mirrors[transfer.name], self._placed(transfer)
                lent.enter_context(mirror.sources(pages) if writes else mirror.destinations(pages))
                asked.append(
                    types().PoolTransfer(
                        name=_engine_name(transfer.name),
                        host_indices=mirror.indices(pages),
                        keys=keys,
                    )
                )
            found = self._caught(
                "batch_set_v2" if writes else "batch_get_v2",
                lambda: dict(call(asked, _extra(extra_info))),
            )
        answered: dict[str, Any] = found or {}
        told = {str.__str__(name): answer for name, answer in answered.items()}
        answers = dict[int, list[bool]]()
        for index, transfer in shares.items():
            answer: Any = told.get(transfer.name)
            # Anything but a list counts for nothing there, and so does a pool that is left out.
            usable = isinstance(answer, (list, tuple)) and answer != [] and answer != ()
            answers[index] = (
                _listed("a call", answer) if usable else [False] * len(transfer.keys or ())
            )
        return answers

    def _caught(self, call: str, ask: Callable[[], Any]) -> Any:
        """Return the answer of a call; None where the engine would have caught what it raised.

        Raises:
            NotPromised: the driver does not implement the method.
        """
        try:
            return ask()
        except NotImplementedError as error:
            raise _not_implemented(call, error) from error
        except Exception as error:
            logger.debug(
                "%s raised %r, which the engine takes for a miss", call, error, exc_info=error
            )
            return None


def _not_implemented(call: str, error: NotImplementedError) -> NotPromised:
    said = f": {error}" if str(error) else ""
    return NotPromised(f"{call} of the driver raises NotImplementedError{said}")


def _get_copies(driver: Any, mirror: Mirror, keys: list[str], pages: list[int]) -> list[bool]:
    blanks = [mirror.pool.get_dummy_flat_data_page() for _ in keys]
    found = driver.batch_get(keys, blanks)
    if found is None:
        return [False] * len(keys)
    answers = list[bool]()
    for page, content in zip(pages, found, strict=True):
        if content is not None:
            mirror.pool.set_from_flat_data_page(page * int(mirror.pool.page_size), content)
        answers.append(content is not None)
    return answers


def _listed(call: str, answer: Any) -> list[bool]:
    """The answers for each page.

    Raises:
        TypeError: there is one answer for all pages, or none, which the engine cannot read.
    """
    if not hasattr(answer, "__iter__"):
        raise TypeError(f"{call} answered {answer!r:.80}, not a list with one answer for each page")
    return [bool(ok) for ok in answer]


def _one_of_each(shares: list[tuple[int, PoolTransfer]]) -> list[dict[int, PoolTransfer]]:
    """Side pools' transfers in as few calls as may be.

    Two of one pool would overwrite each other's answer.
    """
    calls = list[dict[int, PoolTransfer]]()
    for index, transfer in shares:
        if transfer.name == PoolName.KV:
            continue
        call = next(
            (call for call in calls if all(other.name != transfer.name for other in call.values())),
            None,
        )
        if call is None:
            calls.append({index: transfer})
        else:
            call[index] = transfer
    return calls


def _joined(
    transfers: Sequence[PoolTransfer], answers: Mapping[int, list[bool]]
) -> dict[PoolName, list[bool]]:
    open_capped = dict[PoolName, list[bool]]()
    for index, transfer in enumerate(transfers):
        open_capped.setdefault(transfer.name, []).extend(answers.get(index, []))
    return open_capped


def _engine_name(name: str) -> Any:
    """SGLang's own constant for a pool, which drivers compare with."""
    if not has_sglang():
        return PoolName(name)
    return types().PoolName(str(name))


def _question(transfer: PoolTransfer) -> Any:
    module = types()
    keys = list(transfer.keys) if transfer.keys is not None else None
    if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        # The engine asks for windows of one page at least, never of none.
        keys = keys or ["__placeholder__"]
    return module.PoolTransfer(
        name=_engine_name(transfer.name),
        keys=keys,
        hit_policy=module.PoolHitPolicy(str(transfer.hit_policy)),
    )


def _batch_exists(driver: Any, keys: list[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
    return int(driver.batch_exists(keys, _extra(extra_info)))


def _extra(extra_info: HiCacheStorageExtraInfo | None) -> Any:
    return types().HiCacheStorageExtraInfo(
        prefix_keys=list(extra_info.prefix_keys) if extra_info and extra_info.prefix_keys else None
    )
