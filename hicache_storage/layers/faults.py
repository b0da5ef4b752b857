"""Faults around any storage, drawn from a seed: for testing what stands above one, such as an engine.

```python
faults = FaultLayer(create_storage("file", identity, config), FaultOptions(seed=7, failure=0.1, hang=0.01))
```

Whatever it does a real store may do under the contract: a page is missing, a call is a miss, an answer takes long. No wrong
page is delivered, and nothing is raised but what a clear that did not happen raises. Around a storage of `create_storage` a hang is
seen by the engine itself; `wrap(FaultLayer(driver, ...), StorageOptions(...))` has it end at the deadline, as in production.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.layers.miss import MissAnsweringLayer
from hicache_storage.spec import ConfigError, StorageTimeoutError, StorageUnavailableError, note_fault
from hicache_storage.spec.arguments import check_list, check_seconds
from hicache_storage.spec.forks import begin_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import (
        Capabilities,
        HiCacheStorage,
        HiCacheStorageExtraInfo,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
        StorageStats,
    )

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """How often what goes wrong. The probabilities are of each call of exists, get, set and clear, each independent of the others.

    Raises:
        ConfigError: a value is out of range.
    """

    seed: int = 0
    """The same calls in the same order meet the same faults."""
    delay: float = 0.0
    delay_seconds: float = 0.05
    """Longest delay; each is between nothing and that."""
    hang: float = 0.0
    hang_seconds: float = 60.0
    """A hang ends after this long with a miss, or when the layer is told to `relent` or closed. A clear raises then."""
    failure: float = 0.0
    """The call is a miss, and counts as a fault; a clear raises. Half of these calls have reached the storage, and only the answer is lost."""
    partial: float = 0.0
    """Some of the pages are answered as missing, or as not stored."""

    def __post_init__(self) -> None:
        for name in ("delay", "hang", "failure", "partial"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a probability, got {getattr(self, name)}")
        for name in ("delay_seconds", "hang_seconds"):
            check_seconds(name, getattr(self, name), or_zero=True)


class FaultLayer(MissAnsweringLayer):
    """Lets calls be late, hang, fail, or move some of their pages only. Thread-safe."""

    def __init__(self, inner: HiCacheStorage, options: FaultOptions) -> None:
        super().__init__(inner)
        self._options = options
        self._random = Random(options.seed)
        self.struck: Counter[str] = Counter()
        """Faults so far, by the names of the options."""
        self._relented = False
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """New locks."""
        self._lock = threading.Lock()
        self._relents = threading.Event()
        if self._relented:
            self._relents.set()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, may_hang=self.inner.capabilities.may_hang or self._options.hang > 0)

    def relent(self) -> None:
        """No more faults; what hangs goes on."""
        self._relented = True
        self._relents.set()

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        check_list(keys, "keys")
        draw = self._draw()
        # Asking for the head of a chain is how a store answers whose later pages are gone.
        asked = keys[: draw.random.randrange(len(keys))] if draw.partial and keys else keys
        return self._ask(
            draw,
            lambda info: self.inner.batch_exists_v2(asked, pool_transfers, info),
            lambda: self._misses.exists(keys, pool_transfers),
            extra_info,
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        draw = self._draw()
        answer = self._ask(
            draw,
            lambda info: self.inner.batch_get_v2(transfers, info),
            lambda: self._misses.pages(transfers, reads=True),
            extra_info,
        )
        return _holed(answer, draw)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        draw = self._draw()
        answer = self._ask(
            draw,
            lambda info: self.inner.batch_set_v2(transfers, info),
            lambda: self._misses.pages(transfers, reads=False),
            extra_info,
        )
        return _holed(answer, draw)

    def clear(self) -> None:
        draw = self._draw()

        def fail() -> None:
            kind = StorageTimeoutError if draw.hangs else StorageUnavailableError
            raise kind("an injected fault: the pages may have been cleared, or not")

        self._ask(draw, lambda _: self.inner.clear(), fail, None)

    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        return replace(stats, faults=stats.faults + self._failed)

    def fault_count(self) -> int:
        return super().fault_count() + self._failed

    def close(self) -> None:
        self.relent()
        super().close()

    @property
    def _failed(self) -> int:
        return self.struck["failure"] + self.struck["hang"]

    def _draw(self) -> _Draw:
        options = self._options
        with self._lock:
            # Always as many numbers, so that one probability does not decide what the others draw.
            late, hangs, fails, holes = (self._random.random() for _ in range(4))
            seconds, lost, seed = self._random.random(), self._random.random() < 0.5, self._random.getrandbits(32)
            if self._relents.is_set():
                return _Draw(Random(seed))
            draw = _Draw(
                Random(seed),
                delay_seconds=options.delay_seconds * seconds if late < options.delay else 0.0,
                hangs=hangs < options.hang,
                fails=fails < options.failure,
                answers=lost,
                partial=holes < options.partial,
            )
            names = {"delay": draw.delay_seconds > 0, "hang": draw.hangs, "failure": draw.fails and not draw.hangs}
            self.struck.update(name for name, struck in {**names, "partial": draw.partial}.items() if struck)
        return draw

    def _ask(
        self,
        draw: _Draw,
        ask: Callable[[HiCacheStorageExtraInfo | None], AnswerT],
        miss: Callable[[], AnswerT],
        info: HiCacheStorageExtraInfo | None,
    ) -> AnswerT:
        began = time.monotonic()
        if draw.hangs:
            self._relents.wait(self._options.hang_seconds)
            note_fault()
            return miss()
        if draw.delay_seconds:
            self._relents.wait(draw.delay_seconds)
            if info is not None and info.deadline_seconds is not None:
                left = info.deadline_seconds - (time.monotonic() - began)
                if left <= 0:
                    return miss()
                info = replace(info, deadline_seconds=left)
        if not draw.fails:
            return ask(info)
        note_fault()
        if draw.answers:
            ask(info)
        return miss()


@dataclass(frozen=True, slots=True)
class _Draw:
    """What one call meets."""

    random: Random
    delay_seconds: float = 0.0
    hangs: bool = False
    fails: bool = False
    answers: bool = False
    """Of a call that fails: the storage is asked all the same."""
    partial: bool = False


def _holed(answer: dict[PoolName, list[bool]], draw: _Draw) -> dict[PoolName, list[bool]]:
    """The answer with some pages denied, one at least where there are any."""
    total = sum(map(len, answer.values()))
    if not draw.partial or not total:
        return answer
    denied = set(draw.random.sample(range(total), draw.random.randint(1, total)))
    places = iter(range(total))
    return {
        pool: [ok and place not in denied for ok, place in zip(pages, places, strict=False)] for pool, pages in answer.items()
    }
