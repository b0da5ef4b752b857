"""Several pools in one storage, and host pools of every shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from hicache_conformance.harness.pools import (
    EngineHostPool,
    GuardedPool,
    LentMemory,
    PoolMemory,
    slots_of,
    spent,
)
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.model.case import NotPromised, Violation, check, checked, covers
from hicache_conformance.model.rules import Level
from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PagedHostPool,
)
from hicache_storage.spec import HiCacheError, HostPool, PoolName, PoolTransfer, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hicache_conformance.fixtures.context import CaseContext


class PoolCases:
    """GET-1, GET-3 and SET-1 for several pools."""

    @covers("GET-3", levels=Level.POOLS)
    def test_each_pool_has_its_own_holes(self, context: CaseContext) -> None:
        """Random holes in each pool and each of several transfers."""
        sut = context.storage(pools=_four_pools())
        pools, keys = list(sut.memories), context.keys(12)
        stored = {pool: set(context.random.sample(keys, 6)) for pool in pools}
        sut.store_many([PageGroup(sorted(stored[pool]), pool) for pool in pools])
        for _ in range(10):
            shares = [
                PageGroup(context.random.sample(keys, context.random.randint(0, 5)), pool)
                for pool in pools * 2
            ]
            context.random.shuffle(shares)
            for pool, pages in sut.get_many(shares).items():
                asked = [key for share in shares if share.pool == pool for key in share.keys]
                sut.compare_holed(asked, pages, stored[pool], pool, unset="GET-3")

    @covers("GET-1", "SET-1", levels=Level.POOLS)
    def test_names_of_pools_and_keys_do_not_run_together(self, context: CaseContext) -> None:
        """Pools and keys that would be one text if they were only written one after the other."""
        names = ["a", "a_b", "a_b_c", "b", "x" * 64]
        sut = context.storage(pools={name: GuardedPool(pages=16) for name in (PoolName.KV, *names)})
        keys = {
            pool: ["b_c", "c", "_b_c", "a", f"{pool}_c", f"{pool}/c", f"c.{pool}"] for pool in names
        }
        for pool in names:
            sut.store(keys[pool], pool)
        for pool in names:
            sut.expect(keys[pool], pool)

    @covers("SET-1", levels=Level.POOLS, needs=["deletes"])
    def test_a_delete_is_of_one_pool(self, context: CaseContext) -> None:
        """A key is deleted from one pool, and stays in the others."""
        sut, keys = context.storage(pools=_four_pools()), context.keys(3)
        pools = list(sut.memories)
        sut.store_many([PageGroup(keys, pool) for pool in pools])
        pools.remove(doomed := PoolName.MAMBA)
        sut.delete(keys, doomed)
        sut.expect_missing(keys, doomed, rule="SET-1", why="was deleted from this pool")
        for pool in pools:
            sut.expect(keys, pool)

    @covers("GET-1", "GET-3", "SET-1", levels=Level.POOLS)
    def test_borrowed_indices(self, context: CaseContext) -> None:
        """A transfer without own indices takes the keys and slots of the pool that it names."""
        sut = context.storage(
            pools={PoolName.KV: GuardedPool(), "indexer": GuardedPool(components=(40,))}
        )
        keys, pages = context.keys(4), [9, 2, 30, 5]
        for pool in sut.memories:
            sut.fill(PageGroup(keys, pool), pages)
        indexer = PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV)
        holed = [*context.keys(1), *keys[1:]]
        # In both orders: the one that borrows may come first.
        for name, rule, there, transfers in (
            ("batch_set_v2", "SET-1", [True] * 4, [indexer, _kv(pages, keys)]),
            ("batch_get_v2", "GET-3", [False, True, True, True], [_kv(pages, holed), indexer]),
        ):
            answer = sut.call(name, partial(getattr(sut.storage, name), transfers))
            check(
                answer == {"kv": there, "indexer": there},
                rule,
                f"{name} of kv and of indexer, which borrows kv's indices, answered {answer}",
            )
            for pool, memory in sut.memories.items():
                sut.compare(keys[1:], [memory.read(page) for page in pages[1:]], pool)
                memory.fill(pages, spent(memory.page_bytes))
        for pool in sut.memories:
            sut.expect(keys, pool)

    @covers("GET-1", "SET-1", levels=Level.POOLS)
    def test_pools_that_arrive_later(self, context: CaseContext) -> None:
        """A pool may be registered after the first transfers, and again with other memory."""
        sut, keys = context.stored(4)
        later = context.with_pool(sut, "draft", GuardedPool(components=(24, 24)))
        later.store(keys, "draft")
        again = context.with_pool(later, PoolName.KV, GuardedPool(pages=8))
        again.expect(keys)
        again.expect(keys, "draft")


def _kv(pages: list[int], keys: list[str]) -> PoolTransfer:
    return PoolTransfer(PoolName.KV, slots_of(pages, 2), keys=keys)


def _four_pools() -> dict[str, PoolMemory]:
    return {
        PoolName.KV: GuardedPool(components=(64, 64)),
        PoolName.MAMBA: GuardedPool(page_size=1, components=(200, 9, 31)),
        PoolName.SWA: GuardedPool(components=(64, 64)),
        PoolName.INDEXER: GuardedPool(components=(33,)),
    }


PAGES, PAGE_SIZE = 8, 2


class StridedPool(GuardedPool):
    """Lends every second byte of its memory, so that no view is contiguous."""

    def __init__(self) -> None:
        super().__init__(components=(64, 64))
        self._stored = self.geometry.component_bytes
        self.geometry = replace(self.geometry, component_bytes=(32, 32))
        self.page_bytes = self.geometry.page_bytes

    def read(self, page: int) -> bytes:
        return b"".join(view.tobytes() for view in self._page(page))

    def _page(self, page: int) -> list[memoryview]:
        return [view[::2] for view in self.components_at(page, self._stored)]


class FailingPool(EngineHostPool):
    """An engine's pool that raises while `fails` is set.

    So does one on a device when a kernel before has failed.
    """

    fails = False

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        self._check()
        return super().get_data_page(index, flat)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._check()
        super().set_from_flat_data_page(index, data_page)

    def _check(self) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def sdk_pool(kind: str, layout: str) -> HostPool:
    """A pool of the SDK, by the names in `SDK_POOLS`."""
    import torch

    heads: Any = {"layers": range(3), "head_num": 2, "head_dim": 8}
    geometries: dict[str, Any] = {
        "mha": AttentionGeometry(**heads, dtype=torch.bfloat16),
        "mha-uneven-heads": AttentionGeometry(**heads, v_head_dim=5, dtype=torch.uint8),
        "mla": MLAGeometry(layers=range(3), kv_lora_rank=36, dtype=torch.bfloat16),
        "mamba": MambaGeometry(
            layers=range(2),
            temporal_shape=(3, 4),
            conv_shapes=((5, 3), (7,)),
            temporal_dtype=torch.float32,
            conv_dtype=torch.bfloat16,
        ),
        "indexer": IndexerGeometry(layers=range(2)),
    }
    slots = 1 if kind == "mamba" else PAGE_SIZE
    return PagedHostPool(
        geometries[kind], size=PAGES * slots, page_size=slots, layout=layout, pin_memory=False
    )


SDK_POOLS: Final = [
    ("mha-uneven-heads", "layer_first"),
    *(
        (kind, layout)
        for kind, shape in (
            ("mha", AttentionGeometry),
            ("mla", MLAGeometry),
            ("mamba", MambaGeometry),
            ("indexer", IndexerGeometry),
        )
        for layout in shape.ORDERS
    ),
]
"""Kinds and layouts."""


class HostPoolCases:
    """GET-8, and GET-2 of a pool that fails."""

    @covers("GET-8")
    @pytest.mark.parametrize(("kind", "layout"), SDK_POOLS)
    def test_the_sdk_s_pools(self, context: CaseContext, kind: str, layout: str) -> None:
        """MHA, MLA, Mamba and indexer pools in each of their layouts."""
        _serve(context, LentMemory(sdk_pool(kind, layout)))

    @covers("GET-8")
    @pytest.mark.parametrize("skew", [1, 3, 7, 63])
    def test_misaligned_memory(self, context: CaseContext, skew: int) -> None:
        """Components of odd lengths at odd addresses."""
        _serve(context, GuardedPool(pages=16, components=(61, 7, 129), skew=skew))

    @covers("GET-8")
    def test_page_sizes(self, context: CaseContext) -> None:
        """Pages of one slot, of three and of sixty-four."""
        for page_size in (1, 3, 64):
            _serve(context, GuardedPool(pages=8, page_size=page_size))

    @covers("GET-8")
    @pytest.mark.parametrize("kind", [EngineHostPool, StridedPool])
    def test_a_strided_pool(self, context: CaseContext, kind: Callable[[], PoolMemory]) -> None:
        """A pool whose pages are not contiguous: an engine's, which only copies, and views."""
        memory = kind()
        if _is_admitted(context, memory):
            _serve(context, memory)

    @covers("GET-2", "FT-1")
    def test_a_pool_that_fails(self, context: CaseContext) -> None:
        """An engine's pool that raises while pages are taken from it or put into it."""
        memory = FailingPool()
        if not _is_admitted(context, memory):
            raise NotPromised("the driver refuses the host pool that this case lets fail")
        _check_failing(context, memory)


def _check_failing(context: CaseContext, memory: FailingPool) -> None:
    """Let a pool fail in a get and in a set."""
    sut = context.storage(_identity(context, memory), pools={PoolName.KV: memory})
    keys, new = context.keys(3), context.keys(3)
    sut.store(keys)
    pages = sut.own_pages(keys)
    for name, ask, some in (
        ("batch_get_v2", sut.storage.batch_get_v2, keys),
        ("batch_set_v2", sut.storage.batch_set_v2, new),
    ):
        transfers = sut.transfers([PageGroup(some)], [pages])
        memory.fails = True
        checked("FT-1")
        try:
            answer = ask(transfers)[PoolName.KV]
        except Exception as error:
            raise Violation(
                "FT-1",
                f"{name}: the host pool raised, and so did the call: {type(error).__name__}: "
                f"{error}",
            ) from error
        finally:
            memory.fails = False
        check(
            not any(answer),
            "GET-2",
            f"{name}: the host pool raised for each of {len(some)} pages, and the answer is "
            f"{answer}",
        )
    sut.expect(keys)
    sut.expect_missing(new, rule="GET-1", why="could not be taken from its host pool")


def _serve(context: CaseContext, memory: PoolMemory) -> None:
    sut = context.storage(_identity(context, memory), pools={PoolName.KV: memory})
    keys = context.keys(memory.pages // 2)
    sut.store(keys)
    sut.expect_own(keys, rule="GET-8")


def _identity(context: CaseContext, memory: PoolMemory) -> StorageIdentity:
    """Make an identity that describes the pages of a pool."""
    pool: Any = memory.host_pool
    geometry = getattr(pool, "geometry", pool)
    return context.identity(
        page_size=geometry.page_size, layout=geometry.layout, kv_dtype=geometry.dtype
    )


def _is_admitted(context: CaseContext, memory: PoolMemory) -> bool:
    """Return whether a pool is registered, and not refused, as it may be."""
    storage = context.bare(_identity(context, memory))
    checked("GET-8")
    try:
        storage.register_mem_host_pool_v2(memory.host_pool, PoolName.KV)
    except HiCacheError:
        return False
    except Exception as error:
        raise Violation(
            "GET-8", f"registering {type(memory).__name__} raised {type(error).__name__}: {error}"
        ) from error
    finally:
        storage.close()
    return True
