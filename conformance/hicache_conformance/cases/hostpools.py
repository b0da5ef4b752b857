"""Host pools of every shape: served correctly, or refused when they are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicache_conformance.harness.edge_case_pools import (
    SDK_POOLS,
    FailingPool,
    ReadOnlyPool,
    StridedPool,
    WrongLengthPool,
    sdk_pool,
)
from hicache_conformance.harness.pools import EngineHostPool, GuardedPool, LentMemory
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import NotPromised, Violation, check, checked
from hicache_storage.spec import HiCacheError, PoolName

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.pools import PoolMemory
    from hicache_storage.spec import StorageIdentity


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
    def test_an_engine_s_strided_pool(self, context: CaseContext) -> None:
        """A pool as engines have them, whose pages are not contiguous and can only be copied."""
        _serve_or_refuse(context, EngineHostPool())

    @covers("GET-8")
    @pytest.mark.parametrize("kind", [ReadOnlyPool, StridedPool, WrongLengthPool])
    def test_pools_that_cannot_be_served(
        self, context: CaseContext, kind: Callable[[], PoolMemory]
    ) -> None:
        """Pools whose views are read-only, not contiguous, or not as long as the geometry says."""
        _serve_or_refuse(context, kind())

    @covers("GET-2", "FT-1")
    def test_a_pool_that_fails(self, context: CaseContext) -> None:
        """An engine's pool that raises while pages are taken from it or put into it: misses.

        The storage serves again when the pool works.
        """
        memory = FailingPool()
        if not _is_admitted(context, memory):
            raise NotPromised("the driver refuses the host pool that this case lets fail")
        _check_failing(context, memory)


def _check_failing(context: CaseContext, memory: FailingPool) -> None:
    """Let a pool fail in a get and in a set.

    Raises:
        Violation: FT-1 for a call that raised, GET-2 for one that answered True, SET-1 for a page
            that is gone afterwards.
    """
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


def _serve_or_refuse(context: CaseContext, memory: PoolMemory) -> None:
    if _is_admitted(context, memory):
        _serve(context, memory)


def _is_admitted(context: CaseContext, memory: PoolMemory) -> bool:
    """Return whether a pool is registered, and not refused, as it may be.

    Raises:
        Violation: GET-8, registering it raised something else than a refusal.
    """
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
