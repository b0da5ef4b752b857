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
from typing import TYPE_CHECKING, TypeVar, cast

from hicache_storage.layers.guarded import GuardedLayer
from hicache_storage.objects.lifecycle import begin_in_children
from hicache_storage.spec import (
    ConfigError,
    PoolName,
    PoolTransferResult,
    StorageTimeoutError,
    StorageUnavailableError,
    note_fault,
)
from hicache_storage.spec.arguments import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.spec import (
        Capabilities,
        HiCacheStorage,
        HiCacheStorageExtraInfo,
        StorageStats,
    )

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Probabilities of faults in each call of exists, get, set, delete, clear and removals.

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

    def guard(
        self,
        operation: str,
        ask: Callable[[HiCacheStorageExtraInfo | None], AnswerT],
        miss: Callable[[StorageUnavailableError], AnswerT],
        info: HiCacheStorageExtraInfo | None = None,
    ) -> AnswerT:
        faults = self._draw()
        kind = StorageTimeoutError if faults.hangs else StorageUnavailableError
        error = kind("an injected fault: the call may have reached the storage, or not")
        answer = self._inject(faults, ask, lambda: miss(error), info)
        return _with_missing_pages(answer, faults.random) if faults.partial else answer

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


def _with_missing_pages(answer: AnswerT, random: Random) -> AnswerT:
    """Answer as a store that has lost some of the pages, at least one."""
    found: object = answer
    if isinstance(answer, PoolTransferResult):
        # Pages of KV are lost, so that the verdicts on other pools stand.
        left = random.randrange(max(1, answer.extra_pool_hit_pages.get(PoolName.KV, 0)))
        ends = [end for end in answer.restorable_prefix_pages if end <= left]
        pools = answer.extra_pool_hit_pages | {PoolName.KV: left}
        found = PoolTransferResult(ends[-1] if ends else 0, pools, ends)
    elif isinstance(answer, list) and answer:
        pages = cast("list[bool]", answer)
        missing = set(random.sample(range(len(pages)), random.randint(1, len(pages))))
        found = [ok and at not in missing for at, ok in enumerate(pages)]
    elif isinstance(answer, dict):
        # One list for all pools: pages are lost of all of them, or of one.
        by_pool = cast("dict[PoolName, list[bool]]", answer)
        flat = _with_missing_pages([ok for some in by_pool.values() for ok in some], random)
        rest = iter(flat)
        found = {name: [next(rest) for _ in by_pool[name]] for name in by_pool}
    return cast("AnswerT", found)
