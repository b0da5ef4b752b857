"""Random histories of calls, compared with a dictionary as the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.fixtures.state_machine import check_histories
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext


class HistoryCases:
    """GET-1, SET-1 and their neighbours, in any order that calls can come in."""

    @covers("GET-1", "GET-3", "SET-1", "SET-3", "EX-2")
    def test_histories(self, context: CaseContext) -> None:
        """One pool: set, get, exists, delete, clear and reopen, with holes and repeated keys."""
        check_histories(context, [PoolName.KV])

    @covers("GET-1", "SET-1", "EX-1", "EX-3", levels=[Level.POOLS])
    def test_histories_of_several_pools(self, context: CaseContext) -> None:
        """The same over three pools with hit policies."""
        check_histories(context, [PoolName.KV, PoolName.MAMBA, PoolName.INDEXER])
