"""Drivers with one planted fault each that a run of the suite did not see once."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from drivers_caches import SharesEqualPages
from drivers_plain import Plain, PlainConfig

from hicache_storage.objects.requests import RegisteredPool
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_storage.objects.requests import PoolRequest
    from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer, StorageIdentity

WINDOW_SECONDS = 0.002


# Pages that are set while others read them
# ------------------------------------------------------------------------------------------------


class TwoHalves(Plain):
    """Publishes a page in two parts with a checksum each, one 2 ms after the other."""

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        place, whole = self.place(pool, key), b"".join(page)
        if place not in self.pages:
            half = len(whole) // 2
            self.pages[place] = zlib.crc32(whole[:half]).to_bytes(4, "big") + whole[:half]
            time.sleep(WINDOW_SECONDS)
            self.pages[*place, "rest"] = zlib.crc32(whole[half:]).to_bytes(4, "big") + whole[half:]
        return True

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        place = self.place(pool, key)
        parts = [self.pages.get(place), self.pages.get((*place, "rest"))]
        content = b"".join(
            part[4:]
            for part in parts
            if part is not None and zlib.crc32(part[4:]).to_bytes(4, "big") == part[:4]
        )
        for buffer in page:
            buffer[: len(content)], content = content[: len(buffer)], content[len(buffer) :]
        return parts[0] is not None

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        removed = super().delete(keys, pool=pool)
        for key in keys:
            self.pages.pop((*self.place(self.pools[PoolName(pool)], key), "rest"), None)
        return removed


class FindsBeforeItStores(Plain):
    """Lists a page 2 ms before it can be read."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.listed = set[tuple[object, ...]]()

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        place = self.place(pool, key)
        if place not in self.pages:
            self.listed.add(place)
            time.sleep(WINDOW_SECONDS)
            super().put(pool, key, page)
            self.listed.discard(place)
        return True

    def there(self, pool: RegisteredPool, key: str) -> bool:
        return self.place(pool, key) in self.listed or super().there(pool, key)


# What the caller keeps
# ------------------------------------------------------------------------------------------------


class KeepsTheCallersKeys(Plain):
    """Keeps the list of keys of a set, and names the pages by it with the next call."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.lent = list[tuple[RegisteredPool, Sequence[str], list[str]]]()

    def settle(self) -> None:
        for pool, kept, then in self.lent:
            for was, now in zip(then, kept, strict=False):
                if was != now and self.place(pool, was) in self.pages:
                    self.pages[self.place(pool, now)] = self.pages.pop(self.place(pool, was))
        self.lent.clear()

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self.settle()
        answer = super().batch_set_v2(transfers, extra_info)
        for transfer in transfers:
            keys = transfer.keys or ()
            self.lent.append((self.pools[transfer.name], keys, list(keys)))
        return answer

    def read(self, request: PoolRequest) -> list[bool]:
        self.settle()
        return super().read(request)

    def there(self, pool: RegisteredPool, key: str) -> bool:
        self.settle()
        return super().there(pool, key)


class CachesIndices(Plain):
    """Translates a tensor of indices once, and knows it again by its memory."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.known = dict[int, tuple[torch.Tensor, torch.Tensor]]()

    def _known(self, transfer: PoolTransfer) -> PoolTransfer:
        given = transfer.host_indices
        if not isinstance(given, torch.Tensor):
            return transfer
        # The tensor is kept, so that no other one gets its memory.
        _, slots = self.known.setdefault(id(given), (given, given.clone()))
        return replace(transfer, host_indices=slots)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return super().batch_get_v2([self._known(one) for one in transfers], extra_info)


class SkipsCopiesItHasMade(Plain):
    """Remembers which page it has read into which host page, and does not copy it again."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.filled = dict[tuple[PoolName, int], str]()

    def deliver(self, request: PoolRequest) -> list[bool]:
        done = list[bool]()
        for key, slot in zip(request.keys, request.slots, strict=True):
            place = (request.pool.name, slot)
            if self.filled.get(place) == key and self.there(request.pool, key):
                done.append(True)
                continue
            [page] = request.pool.access.targets([slot])
            done.append(self.take(request.pool, key, page))
            request.pool.access.deliver([slot], [page], done[-1:])
            self.filled[place] = key
        return done


class NeedsLists(Plain):
    """Copies the caller's keys by a method that only lists have."""

    def _present(self, name: PoolName, keys: Any) -> list[bool]:
        return super()._present(name, keys.copy())


# Pages that are removed
# ------------------------------------------------------------------------------------------------


class ClearsEqualPages(SharesEqualPages):
    """Keeps equal pages once, and clears them with the first namespace that has them."""

    delete = Plain.delete

    def clear(self) -> None:
        for place in self.doomed():
            self.contents.pop(self.pages[place], None)
        super().clear()


class ClearsTwice(Plain):
    """Clears, and clears again when somebody may have set new pages."""

    def clear(self) -> None:
        super().clear()
        timer = threading.Timer(0.02, self._again)
        timer.daemon = True
        timer.start()

    def _again(self) -> None:
        for place in self.doomed():
            self.pages.pop(place, None)


# Answers of another shape
# ------------------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[list[bool]], Any]] = {
    "OneValue": all,
    "Shorter": lambda answer: answer[:-1],
    "Numbers": lambda answer: [int(ok) for ok in answer],
    "Generators": lambda answer: (ok for ok in answer),
}
"""How an answer can be shaped in place of a list with one truth value for each key."""


def _reshaped(method: str, name: str) -> type[Plain]:
    right = getattr(Plain, method)

    def call(self: Plain, *arguments: Any, **named: Any) -> Any:
        return SHAPES[name](right(self, *arguments, **named))

    return type(f"{method.title().replace('_', '')}{name}", (Plain,), {method: call})


for _method in ("read", "write", "delete", "batch_present"):
    for _name in SHAPES:
        _made = _reshaped(_method, _name)
        globals()[_made.__name__] = _made
