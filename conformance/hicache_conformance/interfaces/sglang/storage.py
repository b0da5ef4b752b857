"""`EngineStorage`: adapts a driver with SGLang's interface to the contract.

It calls the driver as SGLang's cache controller does.

KV goes in batches of 128 pages through `batch_get_v1` and `batch_set_v1`, or through copies in
`batch_get` and `batch_set`; side pools through `batch_get_v2` and `batch_set_v2`, before KV in a
set and after it in a get. At most one lookup, one read and one write run at a time. What a call
raises is a miss where the controller catches it, and raised on where it does not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from unittest import mock

import msgspec

from hicache_conformance.harness.corruption import ObjectCorruption
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.interfaces.foreign_storage import (
    ForeignStorage,
    Mirror,
    joined,
    linger,
    rounds,
)
from hicache_conformance.interfaces.sglang.engine import (
    EnginePages,
    clears,
    construct,
    namespace_suffix,
    storage_config,
    types,
)
from hicache_conformance.model.case import NotPromised, check
from hicache_storage.spec import (
    Capabilities,
    DriverConfig,
    HiCacheStorageExtraInfo,
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageIdentity,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


logger = logging.getLogger(__name__)

BATCH_PAGES: Final = 128
"""SGLang's `STORAGE_BATCH_SIZE`."""


FACTORS: Final = {ObjectCorruption.SHORT: (1, 2), ObjectCorruption.LONG: (2, 1)}
"""Of the page's length, as numerator and denominator."""


def _first_rank(salt: str, options: Mapping[str, Any]) -> int:
    """A rank that no storage of another case, or with other options, has.

    Args:
        salt: of the identity; all that a case compares with each other have the same.
    """
    text = repr((salt, sorted(options.items()))).encode()
    # Far apart, because the ranks of one case are counted from here.
    return 1000 * (1 + int.from_bytes(hashlib.blake2b(text, digest_size=3).digest(), "big"))


class EngineStorage(ForeignStorage):
    """One rank of the engine with the driver attached."""

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        super().__init__(identity, config)
        setup = self._setup
        self._zero_copy = setup.zero_copy or bool(self._options.get("interface_v1"))
        self._suffix = namespace_suffix(identity)
        self._pages: dict[str, EnginePages] = {}
        # One lock for each of the three threads that the engine calls its driver from: calls of one
        # kind never overlap there, calls of different kinds do.
        self._looking = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._clears = clears(setup) if setup.target else setup.clears

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities by the driver's setup, and by the methods of a dynamically loaded class."""
        return replace(super().capabilities, clears=self._clears)

    def corrupt(self, pool: str, key: str, damage: ObjectCorruption) -> bool:
        """Let a rank of equal identity store the page with half its bytes, or twice as many.

        `False` for every other damage.

        Returns:
            Whether that rank's set was answered with `True`. A driver that has the length in its
            names keeps such a page elsewhere, and then there is none in this one's place.
        """
        if damage not in FACTORS:
            return False
        more, less = FACTORS[damage]
        geometry = self._pools[pool].geometry
        other = GuardedPool(
            pages=4,
            page_size=geometry.page_size,
            components=[part * more // less for part in geometry.component_bytes],
            exact=True,
        )
        other.write(0, b"\x5a" * other.page_bytes)
        return self._stored_by_another(self._identity, {pool: other}, pool, key)

    def clear(self) -> None:
        """Clear as the engine does, when nothing else runs."""
        if not self._clears:
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
        hit = int(found.kv_hit_pages)
        told = {str.__str__(name): pages for name, pages in found.extra_pool_hit_pages.items()}
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
        return joined(transfers, answers)

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
        return joined(transfers, answers)

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _attach(self) -> Any:
        if PoolName.KV not in self._pools:
            self._add_pool(PoolName.KV, GuardedPool(pages=8))
        kv = self._pages[PoolName.KV].pool
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
        with mock.patch.dict(os.environ, variables):
            driver = construct(self._setup, config, kv)
        driver.register_mem_pool_host(kv)
        if len(self._pools) > 1:
            for name in self._pools:
                self._register(driver, name)
        driver.on_host_pools_registered()
        time.sleep(self._setup.joining_seconds)
        return driver

    def _detach(self, driver: Any) -> None:
        # Kept alive, because its destructor would take seconds here; the memory that it has
        # registered has to live as long.
        if self._setup.max_lingering:
            linger(driver, [pages.pool for pages in self._pages.values()])
        elif hasattr(driver, "close"):
            driver.close()

    def _add_pool(self, name: str, pool: HostPool) -> None:
        pages = EnginePages(name, pool.geometry, self._identity, self._layout(pool))
        self._pages[name] = pages
        self._mirrors[name] = Mirror(pool, pages)
        # Last: a call may ask for it as soon as it is there.
        super()._add_pool(name, pool)
        if self._driver is not None:
            self._register(self._driver, name)

    def _register(self, driver: Any, name: str) -> None:
        driver.register_mem_host_pool_v2(self._pages[name].pool, _engine_name(name))

    def _config_file(self) -> Path:
        """The configuration file of a driver that reads one, beside its store."""
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

    def _layout(self, host_pool: HostPool) -> str:
        """The layout that is asked for, where the driver serves it.

        Elsewhere another that is not the usual one.
        """
        asked = host_pool.geometry.layout
        if asked == "page_first":
            asked = self._identity.layout
        served = self._setup.layouts
        if asked in served:
            return asked
        return served[0] if asked == "page_first" or len(served) == 1 else served[1]

    def _key(self, key: str) -> str:
        return key + self._suffix

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
            found = self._caught("batch_exists", partial(_batch_exists, driver, batch, extra_info))
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
        mirror, memory = self._mirrors[PoolName.KV], self._pages[PoolName.KV]
        with mirror.destinations(pages):
            if self._zero_copy:
                indices = memory.indices(pages)
                answer = self._caught(
                    "batch_get_v1", lambda: driver.batch_get_v1(keys, indices, _extra(extra))
                )
            else:
                blanks = [memory.pool.get_dummy_flat_data_page() for _ in keys]
                found = self._caught("batch_get", lambda: driver.batch_get(keys, blanks))
                check(
                    found is None or _items(found, len(keys)) is not None,
                    "GET-3",
                    f"batch_get of {len(keys)} keys answered {type(found).__name__}, must be a list "
                    f"with one page, or None, for each",
                )
                answer = self._caught("batch_get", lambda: _put_copies(memory, pages, found))
        return [False] * len(keys) if answer is None else _listed("batch_get_v1", answer, len(keys))

    def _set_kv(
        self, driver: Any, keys: list[str], pages: list[int], extra: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        if not self._identity.is_writer(PoolName.KV):
            # The engine does not ask a rank that is not the writer.
            return [self._prefix(driver, [key], extra) == 1 for key in keys]
        mirror, memory = self._mirrors[PoolName.KV], self._pages[PoolName.KV]
        with mirror.sources(pages):
            if self._zero_copy:
                indices = memory.indices(pages)
                answer = self._caught(
                    "batch_set_v1", lambda: driver.batch_set_v1(keys, indices, _extra(extra))
                )
                # The engine asks whether all are true, and a driver that keeps K and V as objects of
                # their own answers for each of these.
                is_list = isinstance(answer, (list, tuple))
                objects = len(cast("Sequence[Any]", answer)) if is_list else 0
                told = objects if objects and objects % len(keys) == 0 else len(keys)
                done = answer is not None and all(_listed("batch_set_v1", answer, told))
            else:
                size = int(memory.pool.page_size)
                copies = [memory.pool.get_data_page(page * size) for page in pages]
                answer = self._caught("batch_set", lambda: driver.batch_set(keys, copies))
                done = answer is not None and _listed("batch_set", [answer], 1) == [True]
        # The engine takes a batch for stored, or not, as a whole.
        return [done] * len(keys)

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
                mirror, memory = self._mirrors[transfer.name], self._pages[transfer.name]
                keys, pages = self._placed(transfer)
                lent.enter_context(mirror.sources(pages) if writes else mirror.destinations(pages))
                asked.append(
                    types.PoolTransfer(
                        name=_engine_name(transfer.name),
                        host_indices=memory.indices(pages),
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
            pages_asked = len(transfer.keys or ())
            usable = isinstance(answer, (list, tuple)) and answer != [] and answer != ()
            answers[index] = (
                _listed("a call", answer, pages_asked) if usable else [False] * pages_asked
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


def _put_copies(memory: EnginePages, pages: Sequence[int], found: Any) -> list[bool]:
    copies: list[Any] = [None] * len(pages) if found is None else list(found)
    for page, content in zip(pages, copies, strict=True):
        if content is not None:
            memory.pool.set_from_flat_data_page(page * int(memory.pool.page_size), content)
    return [content is not None for content in copies]


def _listed(call: str, answer: Any, count: int) -> list[bool]:
    """The answers for each page.

    Raises:
        Violation: GET-3, it is no list with one truth value for each page.
    """
    listed = _items(answer, count)
    check(
        # By the name of the type, because NumPy's truth value is no `bool` and NumPy is no need.
        listed is not None and all(type(ok).__name__ in ("bool", "bool_") for ok in listed),
        "GET-3",
        f"{call} answered {answer!r:.80}, must be a list with one truth value for each of {count} "
        f"keys",
    )
    return [bool(ok) for ok in listed or ()]


def _items(answer: Any, count: int) -> list[Any] | None:
    """The items of a list or tuple of this length; None if it is none."""
    if not isinstance(answer, (list, tuple)):
        return None
    listed = list(cast("Sequence[Any]", answer))
    return listed if len(listed) == count else None


def _one_of_each(shares: list[tuple[int, PoolTransfer]]) -> list[dict[int, PoolTransfer]]:
    """Side pools' transfers in calls; two of one pool would overwrite each other's answer."""
    of_sides = {index: each for index, each in shares if each.name != PoolName.KV}
    calls = rounds((index, transfer.name) for index, transfer in of_sides.items())
    return [{index: of_sides[index] for index in call.values()} for call in calls]


def _engine_name(name: str) -> Any:
    """SGLang's own constant for a pool, which drivers compare with."""
    return types.PoolName(str(name))


def _question(transfer: PoolTransfer) -> Any:
    keys = list(transfer.keys) if transfer.keys is not None else None
    if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        # The engine asks for windows of one page at least, never of none.
        keys = keys or ["__placeholder__"]
    return types.PoolTransfer(
        name=_engine_name(transfer.name),
        keys=keys,
        hit_policy=types.PoolHitPolicy(str(transfer.hit_policy)),
    )


def _batch_exists(driver: Any, keys: list[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
    return int(driver.batch_exists(keys, _extra(extra_info)))


def _extra(extra_info: HiCacheStorageExtraInfo | None) -> Any:
    return types.HiCacheStorageExtraInfo(
        prefix_keys=list(extra_info.prefix_keys) if extra_info and extra_info.prefix_keys else None
    )
