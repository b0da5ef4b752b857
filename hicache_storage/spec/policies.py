"""Hit policies as pure functions over booleans (rules EX-1 to EX-6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from hicache_storage.spec.arguments import check_list
from hicache_storage.spec.errors import InvalidTransferError
from hicache_storage.spec.transfers import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """Existing pages of the chain in one pool, and the hit policy of the pool."""

    name: PoolName
    present: Sequence[bool]
    """`present[i]`: page i of the chain exists in this pool."""
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    window_pages: int = 1
    """`TRAILING_PAGES`: how many pages before the endpoint must exist."""
    block_pages: int = 0
    group_pages: int = 0

    @classmethod
    def of(cls, transfer: PoolTransfer, present: Sequence[bool]) -> PoolPresence:
        """Presence of the pool that `transfer` asks about.

        Raises:
            InvalidTransferError: `BLOCK_GROUPS` without a usable `block_pages` / `group_pages`, or
                keys that are no list.
        """
        # Only the number of keys counts here: an engine that does not know a pool's keys passes a
        # placeholder, which must not be checked as a key.
        if transfer.keys is not None:
            check_list(transfer.keys, f"pool {transfer.name!r}: keys")
        if (
            transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS
            and not 0 <= transfer.group_pages <= transfer.block_pages != 0
        ):
            raise InvalidTransferError(
                f"pool {transfer.name!r}: block_groups needs 0 <= group_pages <= block_pages and "
                f"block_pages > 0, got group_pages={transfer.group_pages}, "
                f"block_pages={transfer.block_pages}"
            )
        return cls(
            transfer.name,
            present,
            transfer.hit_policy,
            # A window of 0 pages would make every endpoint legal (rule EX-3: at least 1).
            max(1, len(transfer.keys or ())),
            transfer.block_pages,
            transfer.group_pages,
        )


def leading_pages(present: Sequence[bool]) -> int:
    """Number of pages before the first missing one."""
    # Mostly none is missing, which `all` finds out in a third of the time.
    return len(present) if all(present) else present.index(False)


def trailing_endpoints(pool: PoolPresence) -> list[int]:
    """Endpoints at which a `TRAILING_PAGES` pool is restorable, ascending (rule EX-3)."""
    window, run, legal = max(1, pool.window_pages), 0, list[int]()
    for endpoint, exists in enumerate(pool.present, start=1):
        run = run + 1 if exists else 0
        # The second case: a prefix that is shorter than the window has no earlier page to miss.
        if run >= window or run == endpoint:
            legal.append(endpoint)
    return legal


def covered_pages(pool: PoolPresence) -> int:
    """Pages covered by the leading complete groups of a `BLOCK_GROUPS` pool (rule EX-4).

    Block i spans chain pages [i * b, (i + 1) * b); its group is the last g of them.
    """
    block, group = pool.block_pages, pool.group_pages or pool.block_pages
    covered = 0
    while covered + block <= len(pool.present) and all(
        pool.present[covered + block - group : covered + block]
    ):
        covered += block
    return covered


def common_hit(kv: Sequence[bool], pools: Sequence[PoolPresence] = ()) -> PoolTransferResult:
    """Fold the presence of the KV pages and of the side pools into one answer.

    The hit is the greatest member of the *intersection* of all pools' legal endpoints, never the
    minimum of their maxima (rule EX-1). A pool asked about twice keeps its lower verdict.
    """
    kv_hit = leading_pages(kv)
    # A model with attention alone: no sets of endpoints, of which a chain may have thousands.
    if not pools:
        return PoolTransferResult(kv_hit, {PoolName.KV: kv_hit}, list(range(1, kv_hit + 1)))
    verdicts = {PoolName.KV: kv_hit}
    common: set[int] | None = None
    # The endpoints of an `ALL_PAGES` pool have no holes, so one number stands for them; only
    # windows need sets.
    bound = kv_hit
    for pool in pools:
        if pool.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
            # Changes neither `bound` nor `common`: these pools report and never lower the hit (rule
            # EX-4).
            verdict = covered_pages(pool)
        elif pool.hit_policy is PoolHitPolicy.ALL_PAGES:
            verdict = leading_pages(pool.present)
            bound = min(bound, verdict)
        elif pool.hit_policy is PoolHitPolicy.TRAILING_PAGES:
            # Not limited to KV's hit: the verdict is the pool's own longest endpoint (rule EX-6).
            legal = trailing_endpoints(pool)
            verdict = legal[-1] if legal else 0
            common = set(legal) if common is None else common.intersection(legal)
        else:
            assert_never(pool.hit_policy)
        verdicts[pool.name] = min(verdict, verdicts.get(pool.name, verdict))
    restorable = (
        list(range(1, bound + 1)) if common is None else sorted(p for p in common if p <= bound)
    )
    return PoolTransferResult(restorable[-1] if restorable else 0, verdicts, restorable)
