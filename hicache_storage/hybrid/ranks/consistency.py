"""Checks that every rank has the same configuration, and that no rank refuses."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_storage.spec import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.hybrid.ranks.group import RankGroup

MadeT = TypeVar("MadeT")

MAX_EXACT_NUMBER: Final = 1 << 56
"""Largest number that is compared as it is; every other value is compared by a larger digest."""


class OtherRankError(HiCacheError, RuntimeError):
    """Another rank failed while this one could go on.

    That rank's own error has the cause.
    """

    code = "other-rank"


def check_consistent(
    rank_group: RankGroup, values: Mapping[str, object], refusal: BaseException | None = None
) -> None:
    """Check that no rank refuses, and that all ranks have the same values.

    A collective.

    Args:
        values: by the names that messages use, the same names on every rank. Two values are equal
            if their `repr` is.
        refusal: this rank's own error; its values are ignored then.

    Raises:
        OtherRankError: another rank refuses.
        ConfigError: values differ; the message names them.
        BaseException: `refusal`.
    """
    # A rank that refuses sends zeros: the vector has the same length on every rank.
    mine = [_number(value) if refusal is None else 0 for value in values.values()]
    # One reduction gives both bounds: the maximum is the negated minimum of the negated numbers.
    accepted, *lowest = rank_group.all_reduce_min(
        [int(refusal is None), *mine, *(-number for number in mine)]
    )
    if refusal is not None:
        raise refusal
    if not accepted:
        raise OtherRankError("another rank refuses its configuration; its own error says why")
    bounds = zip(values.items(), lowest[: len(mine)], lowest[len(mine) :], strict=True)
    wrong = [
        _difference(name, value, low, -high) for (name, value), low, high in bounds if low != -high
    ]
    if wrong:
        raise ConfigError(f"ranks differ in {', '.join(wrong)}; make it the same on every rank")


def make_on_all_ranks(rank_group: RankGroup, what: str, make: Callable[[], MadeT]) -> MadeT:
    """Call `make` on every rank; where it fails on one, all ranks raise. A collective.

    Raises:
        OtherRankError: `make` failed on another rank.
        BaseException: the error of `make` on this rank.
    """
    made, error = None, None
    try:
        made = make()
    except BaseException as failure:  # noqa: BLE001 - raised below, once the other ranks know; drivers call sys.exit
        error = failure
    all_made = rank_group.all_reduce_min([int(error is None)])[0]
    if error is not None:
        raise error
    if not all_made or made is None:
        raise OtherRankError(f"another rank could not make its {what}")
    return made


def _number(value: object) -> int:
    if isinstance(value, int) and abs(value) <= MAX_EXACT_NUMBER:
        return value
    digest = hashlib.sha256(repr(value).encode()).digest()
    # 56 bits of the digest above the exact numbers: the sum and its negation fit into int64, in
    # which ranks reduce.
    return MAX_EXACT_NUMBER + 1 + int.from_bytes(digest[:7])


def _difference(name: str, value: object, low: int, high: int) -> str:
    # Digests are not shown: they mean nothing to a reader.
    if type(value) is int and high <= MAX_EXACT_NUMBER:
        return f"{name} ({value} here, {low} to {high} in all)"
    return name
