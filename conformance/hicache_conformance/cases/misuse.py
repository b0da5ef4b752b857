"""Misuse is an error of the caller: always raised, naming the argument, before any I/O."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from hicache_conformance.harness.pools import GuardedPool, PoolMemory, canary, slots_of
from hicache_conformance.harness.storage_under_test import (
    PageGroup,
    StorageUnderTest,
    block_groups,
    check_raises,
)
from hicache_conformance.model.case import check, covers
from hicache_storage.spec import (
    HiCacheError,
    HiCacheStorage,
    PoolName,
    PoolTransfer,
    RemovalScope,
    UnsupportedOperationError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hicache_conformance.fixtures.context import CaseContext

PAGES: Final = (5, 2, 9)
UNKNOWN: Final = "nobody_s_pool"

BAD_INDICES: Final[Mapping[str, Callable[[torch.Tensor], object]]] = {
    "none": lambda good: None,
    "too-few": lambda good: good[:-1],
    "a-page-too-few": lambda good: good[:-2],
    "too-many": lambda good: good.repeat(2),
    "none-at-all": lambda good: good[:0],
    "int32": lambda good: good.int(),
    "floats": lambda good: good.double(),
    "a-list": lambda good: list(good),
    "negative": lambda good: good - 100,
    "behind-the-end": lambda good: good + 1_000_000,
    "last-slot-behind-the-end": lambda good: slots_of([64, *PAGES[1:]], 2),
    "off-a-page-s-start": lambda good: good + 1,
    "not-consecutive": lambda good: good.flip(0),
}
"""How indices can be wrong, for 3 pages of 2 slots in a pool of 64 pages."""

BAD_KEYS: Final[Mapping[str, object]] = {
    "none": None,
    "one-text": "abc",
    "a-number-among-them": ["a", 7, "c"],
    "nul": ["a", "b\0c", "c"],
    "513-bytes": ["a", "k" * 513, "c"],
    "513-bytes-of-unicode": ["a", "\u00e9" * 256 + "k", "c"],
    "a-lone-surrogate": ["a", "\ud800", "c"],
    "a-number": 3,
    "an-iterator": lambda: iter(["a", "b", "c"]),
}
"""How keys can be wrong, for 3 pages; a function makes what cannot be used twice."""


def _move(call: str, storage: HiCacheStorage, keys: list[str]) -> object:
    return getattr(storage, call)([PoolTransfer(PoolName.KV, slots_of(PAGES, 2), keys=keys)])


def _borrow(storage: HiCacheStorage, keys: list[str]) -> object:
    borrower = PoolTransfer(PoolName.INDEXER, keys=keys, indices_from_pool=PoolName.KV)
    return storage.batch_get_v2([borrower])


def _ask(block: int, group: int, storage: HiCacheStorage, keys: list[str]) -> object:
    return storage.batch_exists_v2(keys, [block_groups("indexer", block, group)])


def _register(pool: object, name: str, storage: HiCacheStorage, _: list[str]) -> object:
    return storage.register_mem_host_pool_v2(pool, name)


REFUSED: Final[Mapping[str, tuple[str, Callable[[HiCacheStorage, list[str]], object]]]] = {
    "delete from an unregistered pool": (
        "",
        lambda storage, keys: storage.delete(keys, pool=UNKNOWN),
    ),
    "indices from a pool that is not in the call": ("indices", _borrow),
    **{
        f"before any registration {call}": (PoolName.KV, partial(_move, call))
        for call in ("batch_get_v2", "batch_set_v2")
    },
    **{
        f"block_groups of {block} and {group}": ("block", partial(_ask, block, group))
        for block, group in ((0, 0), (2, 3), (-1, 0), (2, -1))
    },
    **{
        f"registering {kind}": ("", partial(_register, pool, PoolName.KV))
        for kind, pool in {"None": None, "7": 7, "a text": "kv", "an object": object()}.items()
    },
    **{
        f"registering as {name!a}": ("name", partial(_register, GuardedPool(), name))
        for name in ("", "KV", "k v", "kv/1", "..", "x" * 65, "caf\u00e9")
    },
}
"""Calls that are refused, with what the error has to name."""


class MisuseCases:
    """FT-2."""

    @covers("FT-2")
    @pytest.mark.parametrize("call", ["batch_get_v2", "batch_set_v2"])
    @pytest.mark.parametrize(
        ("named", "how"),
        [
            *product(["indices"], BAD_INDICES),
            *product(["key"], BAD_KEYS),
            (UNKNOWN, "unregistered"),
        ],
    )
    def test_a_bad_transfer(self, context: CaseContext, call: str, named: str, how: str) -> None:
        """Indices that do not fit keys or pool, keys that are no legal text, an unregistered pool."""
        changes: dict[str, Callable[[], dict[str, Any]]] = {
            "indices": lambda: {"host_indices": BAD_INDICES[how](slots_of(PAGES, 2))},
            "key": lambda: {"keys": _bad_keys(how)},
            UNKNOWN: lambda: {"name": UNKNOWN},
        }
        _check_refused(context, call, changes[named], named, how)

    @covers("FT-2")
    @pytest.mark.parametrize("how", REFUSED)
    def test_a_wrong_call(self, context: CaseContext, how: str) -> None:
        """Pools that are not registered or are none, their names, groups and borrowed indices."""
        named, ask = REFUSED[how]
        bare = how.startswith(("register", "before"))
        pools: dict[str, PoolMemory] = (
            {} if bare else {PoolName.KV: GuardedPool(), "indexer": GuardedPool()}
        )
        storage = context.storage(pools=pools).storage
        _refused(partial(ask, storage, context.keys(3)), how, named)

    @covers("FT-2")
    @pytest.mark.parametrize("how", BAD_KEYS)
    def test_bad_keys_of_other_calls(self, context: CaseContext, how: str) -> None:
        """exists, batch_present and delete refuse the same keys; nothing is deleted."""
        sut, keys = context.storage(), ["a", "b", "c"]
        sut.store(keys)
        storage = sut.storage
        asks: dict[str, Callable[[Any], object]] = {
            "batch_exists_v2": storage.batch_exists_v2,
            "batch_present": storage.batch_present,
            **({"delete": storage.delete} if context.capabilities.deletes else {}),
        }
        for name, ask in asks.items():
            _refused(partial(ask, _bad_keys(how)), f"{name} of keys with {how}", "key")
        sut.expect(keys, rule="FT-2")

    @covers("FT-2")
    def test_undeclared_operations(self, context: CaseContext) -> None:
        """delete() and clear(), where they are declared and elsewhere."""
        sut, keys = context.storage(), context.keys(1)
        for name, declared, ask in (
            ("delete", context.capabilities.deletes, lambda: sut.storage.delete(keys)),
            ("clear", context.capabilities.clears, sut.storage.clear),
        ):
            sut.store(keys)
            if declared:
                sut.call(name, ask)
                sut.expect_missing(keys, rule="FT-2", why=f"was removed by a {name}()")
            else:
                _refused(ask, f"{name}(), which is not declared,", "", UnsupportedOperationError)
        if context.capabilities.removals is RemovalScope.NONE:
            what = "removals(), which is not declared,"
            _refused(sut.storage.removals, what, "", UnsupportedOperationError)
        else:
            since_text = partial(sut.storage.removals, cast("int", "1"))
            _refused(since_text, "removals() since a text", "since")


def _bad_keys(how: str) -> Any:
    bad: Any = BAD_KEYS[how]
    return bad() if callable(bad) else bad


def _check_refused(
    context: CaseContext, call: str, change: Callable[[], dict[str, Any]], argument: str, how: str
) -> None:
    """A call of one right and one wrong transfer is refused, and has moved nothing of either."""
    sut = context.storage(pools={PoolName.KV: GuardedPool(), "indexer": GuardedPool()})
    keys, stored = context.keys(3), context.keys(3)
    sut.store(stored, "indexer")
    right_keys = keys if call == "batch_set_v2" else stored
    right = PoolTransfer(PoolName.INDEXER, slots_of(PAGES, 2), keys=right_keys)
    fields: Any = {"name": "kv", "host_indices": slots_of(PAGES, 2), "keys": keys}
    for pool, memory in sut.memories.items():
        memory.fill(range(memory.pages), canary(0, memory.page_bytes))
        sut.fill(PageGroup(right_keys, pool), PAGES)
    for first in (True, False):

        def ask(first: bool = first) -> object:
            wrong = PoolTransfer(**{**fields, **change()})
            return getattr(sut.storage, call)([wrong, right] if first else [right, wrong])

        _refused(ask, f"{call} with {argument}: {how}", argument)
        _check_untouched(sut, keys, call, how)


def _check_untouched(sut: StorageUnderTest, keys: list[str], call: str, how: str) -> None:
    for key in keys:
        check(
            not sut.has(key, "indexer"),
            "FT-2",
            f"{call} was refused ({how}), and stored the page of the other transfer before it "
            f"raised",
        )
    for pool, memory in sut.memories.items():
        blank = canary(0, memory.page_bytes)
        others = [page for page in range(memory.pages) if page not in PAGES]
        touched = memory.changed(others, blank)
        check(
            not touched,
            "FT-2",
            f"{call} was refused ({how}), and pages {touched} of pool {pool!r} changed",
        )


def _refused(
    ask: Callable[[], object], what: str, named: str, kind: type[HiCacheError] = HiCacheError
) -> None:
    error = check_raises(kind, "FT-2", what, ask)
    is_named = named.lower() in str(error).lower()
    check(is_named, "FT-2", f"{what} was refused, but the error does not name {named!r}: {error}")
