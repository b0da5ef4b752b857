"""Oracle for exists: the answers by the text of the rules EX-1 to EX-6, independent of the SDK."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.case import check, checked
from hicache_storage.spec import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

if TYPE_CHECKING:
    from collections.abc import Sequence


_MAX_DRAWN: Final = 64


@dataclass(frozen=True, slots=True)
class PoolQuery:
    """A side pool in a question: the transfer, and which pages of the chain are there in truth."""

    transfer: PoolTransfer
    present: Sequence[bool]

    def is_legal(self, endpoint: int) -> bool:
        """Return whether the pool can restore a prefix of `endpoint` pages."""
        match self.transfer.hit_policy:
            case PoolHitPolicy.ALL_PAGES:
                return all(self.present[page] for page in range(endpoint))
            case PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(self.transfer.keys or ()))
                return all(
                    self.present[page] for page in range(max(0, endpoint - window), endpoint)
                )
            case PoolHitPolicy.BLOCK_GROUPS:
                return True

    def verdict(self) -> int:
        """The pool's own answer."""
        pages = len(self.present)
        if self.transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
            block, complete = self.transfer.block_pages, 0
            group = self.transfer.group_pages or block
            # Leading groups only: one that is missing ends the count, although later ones may be
            # there (EX-4).
            for end in range(block, pages + 1, block):
                if not all(self.present[page] for page in range(end - group, end)):
                    break
                complete = end
            return complete
        return max(
            (endpoint for endpoint in range(1, pages + 1) if self.is_legal(endpoint)), default=0
        )

    def __str__(self) -> str:
        policy = self.transfer.hit_policy
        detail = ""
        if policy is PoolHitPolicy.TRAILING_PAGES:
            detail = f" {len(self.transfer.keys or ())}"
        elif policy is PoolHitPolicy.BLOCK_GROUPS:
            detail = f" {self.transfer.block_pages}/{self.transfer.group_pages}"
        return f"{self.transfer.name} {drawn(self.present)} ({policy}{detail})"


def check_exists(
    answer: PoolTransferResult,
    kv: Sequence[bool],
    asked: Sequence[PoolQuery] = (),
    *,
    verdicts: bool = True,
) -> None:
    """Compare an answer with the truth.

    Args:
        kv: which pages of the chain are there in the KV pool.
        asked: the same for each side pool.
        verdicts: whether each pool's own verdict is part of the answer.

    Raises:
        Violation: the rule, the presence of every page, and what the answer must be.
    """
    legal = [
        endpoint
        # Every endpoint is tried by the words of the rules, slow as that is: the oracle must not
        # share a shortcut, and its error, with the SDK.
        for endpoint in range(1, len(kv) + 1)
        if all(kv[:endpoint]) and all(pool.is_legal(endpoint) for pool in asked)
    ]
    hit = legal[-1] if legal else 0
    scene = ", ".join([f"kv {drawn(kv)}", *map(str, asked)])
    check(
        answer.kv_hit_pages == hit,
        _hit_rule(asked),
        f"{scene}: kv_hit_pages is {answer.kv_hit_pages}, must be {hit}",
    )
    # The endpoint of all pools, whichever rule a wrong one breaks.
    checked("EX-1")
    check(
        list(answer.restorable_prefix_pages) == legal,
        "EX-5",
        f"{scene}: restorable_prefix_pages is {_shown(answer.restorable_prefix_pages)}, must be "
        f"{_shown(legal)}",
    )
    if not verdicts:
        return
    kv_verdict = next((page for page, there in enumerate(kv) if not there), len(kv))
    _check_verdict(answer, PoolName.KV, kv_verdict, "EX-2", scene)
    for pool in asked:
        _check_verdict(
            answer, pool.transfer.name, pool.verdict(), _RULES[pool.transfer.hit_policy], scene
        )


def drawn(present: Sequence[bool]) -> str:
    """A presence map as text: `x` for a page that is there.

    A long one as runs, such as `x200 .1 x99`.
    """
    if len(present) > _MAX_DRAWN:
        runs = [(there, sum(1 for _ in pages)) for there, pages in groupby(present)]
        return " ".join(f"{'x' if there else '.'}{count}" for there, count in runs)
    return "".join("x" if there else "." for there in present)


def _shown(endpoints: Sequence[int]) -> str:
    shown = str(endpoints)
    if len(shown) <= 4 * _MAX_DRAWN:
        return shown
    return f"{endpoints[0]} to {endpoints[-1]}, {len(endpoints)} in all"


def _check_verdict(
    answer: PoolTransferResult, pool: PoolName, verdict: int, rule: str, scene: str
) -> None:
    told = answer.extra_pool_hit_pages.get(pool)
    checked("EX-6")
    check(
        told == verdict,
        "EX-6" if told is None else rule,
        f"{scene}: extra_pool_hit_pages[{str(pool)!r}] is {told}, must be {verdict}",
    )


def _hit_rule(asked: Sequence[PoolQuery]) -> str:
    """The rule that a wrong hit is about.

    The policy's own where one pool decides, EX-1 where several do.
    """
    policies = {pool.transfer.hit_policy for pool in asked}
    if len(asked) > 1 and policies != {PoolHitPolicy.BLOCK_GROUPS}:
        return "EX-1"
    return _RULES[policies.pop()] if asked else "EX-2"


_RULES = {
    PoolHitPolicy.ALL_PAGES: "EX-2",
    PoolHitPolicy.TRAILING_PAGES: "EX-3",
    PoolHitPolicy.BLOCK_GROUPS: "EX-4",
}
