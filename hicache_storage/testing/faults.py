"""Fault injection into any storage, drawn from a seed: for tests of engines and of other callers.

```python
faults = FaultLayer(create_storage("file", identity, config), FaultOptions(seed=7, failure=0.1, hang=0.01))
```

A real store may do everything that is injected, under the contract: a page is missing, a call is a
miss, an answer is late. No wrong page is delivered, and only a clear raises, as one that has failed
does. Around a storage of `create_storage` a hang reaches the engine; in `wrap(FaultLayer(driver,
...), StorageOptions(...))` it ends at the deadline, as in production.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.layers.guarded import GuardedLayer, no_hit, no_pages
from hicache_storage.objects.lifecycle import begin_in_children
from hicache_storage.spec import (
    ConfigError,
    PoolName,
    RemovalScope,
    StorageTimeoutError,
    StorageUnavailableError,
    note_fault,
)
from hicache_storage.spec.arguments import check_list, check_seconds
from hicache_storage.spec.removals import no_removals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import (
        Capabilities,
        HiCacheStorage,
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        Removals,
        StorageStats,
    )

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Probabilities of faults in each call of exists, get, set, clear and removals.

    Each is independent of the others.

    Raises:
        ConfigError: a value is out of range.
    """

    seed: int = 0
    """Seed of the faults: the same calls in the same order meet the same ones."""
    delay: float = 0.0
    delay_seconds: float = 0.05
    """Maximum of the delays, which are uniform from 0 on."""
    hang: float = 0.0
    hang_seconds: float = 60.0
    """Time after which a hang ends with a miss, in seconds; a clear then raises.

    `disable` or `close` ends it earlier.
    """
    failure: float = 0.0
    """The call is a miss, and counts as a fault; a clear raises.

    Half of these calls reach the storage: only the answer is lost.
    """
    partial: float = 0.0
    """Some of the pages are answered as missing, or as not stored."""

    def __post_init__(self) -> None:
        for name in ("delay", "hang", "failure", "partial"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a probability, got {getattr(self, name)}")
        for name in ("delay_seconds", "hang_seconds"):
            check_seconds(name, getattr(self, name), or_zero=True)


class FaultLayer(GuardedLayer):
    """A fault injector: calls are late, hang, fail, or move only some of their pages.

    Thread-safe.
    """

    def __init__(self, inner: HiCacheStorage, options: FaultOptions) -> None:
        super().__init__(inner)
        self._options = options
        self._random = Random(options.seed)
        self.injected: Counter[str] = Counter()
        """Number of injected faults, by the names of the options."""
        self._disabled = False
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """Replace the locks, which threads of the parent may hold."""
        self._lock = threading.Lock()
        self._disabling = threading.Event()
        if self._disabled:
            self._disabling.set()

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            self.inner.capabilities,
            may_hang=self.inner.capabilities.may_hang or self._options.hang > 0,
        )

    def disable(self) -> None:
        """Inject no more faults, and end those that hang or delay a call."""
        self._disabled = True
        self._disabling.set()

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        check_list(keys, "keys")
        faults = self._draw()
        # A lookup of the head of the chain alone has the answer of a store that has lost the later
        # pages.
        asked = keys[: faults.random.randrange(len(keys))] if faults.partial and keys else keys
        return self._inject(
            faults,
            lambda info: self.inner.batch_exists_v2(asked, pool_transfers, info),
            lambda: no_hit(keys, pool_transfers),
            extra_info,
        )

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        check_list(keys, "keys")
        faults = self._draw()
        asked = keys[: faults.random.randrange(len(keys))] if faults.partial and keys else keys
        found = self._inject(
            faults,
            lambda info: self.inner.batch_present(asked, pool=pool, extra_info=info),
            lambda: no_pages(keys, pool),
            extra_info,
        )
        return found + [False] * (len(keys) - len(found))

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        faults = self._draw()
        answer = self._inject(
            faults,
            lambda info: self.inner.batch_get_v2(transfers, info),
            lambda: self.none_moved(transfers, reads=True),
            extra_info,
        )
        return _with_missing_pages(answer, faults)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        faults = self._draw()
        answer = self._inject(
            faults,
            lambda info: self.inner.batch_set_v2(transfers, info),
            lambda: self.none_moved(transfers, reads=False),
            extra_info,
        )
        return _with_missing_pages(answer, faults)

    def clear(self) -> None:
        faults = self._draw()

        def fail() -> None:
            kind = StorageTimeoutError if faults.hangs else StorageUnavailableError
            raise kind("an injected fault: the pages may have been cleared, or not")

        self._inject(faults, lambda _: self.inner.clear(), fail, None)

    def removals(
        self, since: int | None = None, *, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Removals:
        if self.capabilities.removals is RemovalScope.NONE:
            return super().removals(since, extra_info=extra_info)
        return self._inject(
            self._draw(),
            lambda info: self.inner.removals(since, extra_info=info),
            lambda: no_removals(since),
            extra_info,
        )

    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        return replace(stats, faults=stats.faults + self._failed)

    def fault_count(self) -> int:
        return super().fault_count() + self._failed

    def close(self) -> None:
        self.disable()
        super().close()

    @property
    def _failed(self) -> int:
        return self.injected["failure"] + self.injected["hang"]

    def _draw(self) -> _CallFaults:
        options = self._options
        with self._lock:
            # Always the same number of draws, so that one probability does not change the faults of
            # the others.
            late, hangs, fails, holes = (self._random.random() for _ in range(4))
            # Each call has a generator of its own: with a shared one, the order of draws would
            # depend on how threads interleave.
            seconds, lost, seed = (
                self._random.random(),
                self._random.random() < 0.5,
                self._random.getrandbits(32),
            )
            if self._disabling.is_set():
                return _CallFaults(Random(seed))
            faults = _CallFaults(
                Random(seed),
                delay_seconds=options.delay_seconds * seconds if late < options.delay else 0.0,
                hangs=hangs < options.hang,
                fails=fails < options.failure,
                reaches_storage=lost,
                partial=holes < options.partial,
            )
            names = {
                "delay": faults.delay_seconds > 0,
                "hang": faults.hangs,
                "failure": faults.fails and not faults.hangs,
            }
            self.injected.update(
                name
                for name, is_injected in {**names, "partial": faults.partial}.items()
                if is_injected
            )
        return faults

    def _inject(
        self,
        faults: _CallFaults,
        ask: Callable[[HiCacheStorageExtraInfo | None], AnswerT],
        miss: Callable[[], AnswerT],
        info: HiCacheStorageExtraInfo | None,
    ) -> AnswerT:
        began = time.monotonic()
        if faults.hangs:
            # An event in place of `time.sleep`: `disable` and `close` end the hang.
            self._disabling.wait(self._options.hang_seconds)
            note_fault()
            return miss()
        if faults.delay_seconds:
            self._disabling.wait(faults.delay_seconds)
            if info is not None and info.deadline_seconds is not None:
                # The storage below measures the deadline from its own start: without this, the
                # injected delay would be added to the caller's time.
                left = info.deadline_seconds - (time.monotonic() - began)
                if left <= 0:
                    return miss()
                info = replace(info, deadline_seconds=left)
        if not faults.fails:
            return ask(info)
        note_fault()
        if faults.reaches_storage:
            ask(info)
        return miss()


@dataclass(frozen=True, slots=True)
class _CallFaults:
    """Faults of one call."""

    random: Random
    delay_seconds: float = 0.0
    hangs: bool = False
    fails: bool = False
    reaches_storage: bool = False
    """True if a failing call reaches the storage."""
    partial: bool = False


def _with_missing_pages(
    answer: dict[PoolName, list[bool]], faults: _CallFaults
) -> dict[PoolName, list[bool]]:
    """Replace answers of some pages by `False`, at least of one."""
    total = sum(map(len, answer.values()))
    if not faults.partial or not total:
        return answer
    missing = set(faults.random.sample(range(total), faults.random.randint(1, total)))
    # One iterator for all pools: places are counted over the whole answer.
    places = iter(range(total))
    return {
        pool: [ok and place not in missing for ok, place in zip(pages, places, strict=False)]
        for pool, pages in answer.items()
    }
