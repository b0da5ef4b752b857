"""Host pools of every shape: served correctly, or refused when they are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicache_conformance.harness.edge_case_pools import POOLS, FailingPool, ReadOnlyPool, StridedPool, WrongLengthPool
from hicache_conformance.harness.pools import EnginePool, GuardedPool, LentMemory
from hicache_conformance.harness.storage_under_test import Share
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import HiCacheError, PoolName

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.pools import PoolMemory
    from hicache_storage.spec import HostPool


class HostPoolCases:
    """GET-8, and GET-2 of a pool that fails."""

    @covers("GET-8")
    @pytest.mark.parametrize("make", POOLS.values(), ids=POOLS.keys())
    def test_the_sdk_s_pools(self, lab: Lab, make: Callable[[], HostPool]) -> None:
        """MHA, MLA, Mamba and indexer pools in each of their layouts."""
        _serve(lab, LentMemory(make()))

    @covers("GET-8")
    @pytest.mark.parametrize("skew", [1, 3, 7, 63])
    def test_misaligned_memory(self, lab: Lab, skew: int) -> None:
        """Components of odd lengths at odd addresses."""
        _serve(lab, GuardedPool(pages=16, components=(61, 7, 129), skew=skew))

    @covers("GET-8")
    def test_page_sizes(self, lab: Lab) -> None:
        """Pages of one slot, of three and of sixty-four."""
        for page_size in (1, 3, 64):
            _serve(lab, GuardedPool(pages=8, page_size=page_size))

    @covers("GET-8")
    def test_an_engine_s_strided_pool(self, lab: Lab) -> None:
        """A pool as engines have them, whose pages are not contiguous and can only be copied."""
        _serve_or_refuse(lab, EnginePool())

    @covers("GET-8")
    @pytest.mark.parametrize("kind", [ReadOnlyPool, StridedPool, WrongLengthPool])
    def test_pools_that_cannot_be_served(self, lab: Lab, kind: Callable[[], PoolMemory]) -> None:
        """Pools whose views are read-only, not contiguous, or not as long as the geometry says."""
        _serve_or_refuse(lab, kind())

    @covers("GET-2", "FT-1")
    def test_a_pool_that_fails(self, lab: Lab) -> None:
        """An engine's pool that raises while pages are taken from it or put into it: misses, and served again when it works."""
        memory = FailingPool()
        if _is_admitted(lab, memory):
            _check_failing(lab, memory)


def _check_failing(lab: Lab, memory: FailingPool) -> None:
    """Let a pool fail in a get and in a set.

    Raises:
        Violation: FT-1 for a call that raised, GET-2 for one that answered True, SET-1 for a page that is gone afterwards.
    """
    subject, keys, new = lab.storage(pools={PoolName.KV: memory}), lab.keys(3), lab.keys(3)
    subject.store(keys)
    pages = subject.own_pages(keys)
    for name, ask, some in (
        ("batch_get_v2", subject.storage.batch_get_v2, keys),
        ("batch_set_v2", subject.storage.batch_set_v2, new),
    ):
        transfers = subject.transfers([Share(some)], [pages])
        memory.fails = True
        try:
            answer = ask(transfers)[PoolName.KV]
        except Exception as error:
            raise Violation(
                "FT-1", f"{name}: the host pool raised, and so did the call: {type(error).__name__}: {error}"
            ) from error
        finally:
            memory.fails = False
        if any(answer):
            raise Violation("GET-2", f"{name}: the host pool raised for each of {len(some)} pages, and the answer is {answer}")
    subject.expect(keys)
    subject.expect_missing(new, rule="GET-1", why="could not be taken from its host pool")


def _serve(lab: Lab, memory: PoolMemory) -> None:
    subject, keys = lab.storage(pools={PoolName.KV: memory}), lab.keys(memory.pages // 2)
    subject.store(keys)
    subject.expect_own(keys, rule="GET-8")


def _serve_or_refuse(lab: Lab, memory: PoolMemory) -> None:
    if _is_admitted(lab, memory):
        _serve(lab, memory)


def _is_admitted(lab: Lab, memory: PoolMemory) -> bool:
    """Whether a pool is registered, and not refused, as it may be.

    Raises:
        Violation: GET-8, registering it raised something else than a refusal.
    """
    storage = lab.bare()
    try:
        storage.register_mem_host_pool_v2(memory.host_pool, PoolName.KV)
    except HiCacheError:
        return False
    except Exception as error:
        raise Violation("GET-8", f"registering {type(memory).__name__} raised {type(error).__name__}: {error}") from error
    finally:
        storage.close()
    return True
