"""Whether every rank was told the same, and how all of them learn that one refuses."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_storage.spec import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.hybrid.agreement import Agreement

MadeT = TypeVar("MadeT")

LARGEST: Final = 1 << 56
"""Numbers up to it are compared, and told, as they are; whatever else by a digest, which is larger."""


class OtherRankError(HiCacheError, RuntimeError):
    """This rank could have gone on, and another could not; its own error says why."""

    code = "other-rank"


def check_alike(agreement: Agreement, values: Mapping[str, object], refusal: BaseException | None = None) -> None:
    """Refuse ranks of which one refuses, or that were told different things. A collective.

    Args:
        values: by what a message calls them, the same names on every rank. Counted as equal where their `repr` is.
        refusal: why this rank cannot go on; its values are not looked at then.

    Raises:
        OtherRankError: another rank refuses.
        ConfigError: the message names what differs.
        BaseException: `refusal`.
    """
    mine = [_number(value) if refusal is None else 0 for value in values.values()]
    willing, *lowest = agreement.minimum([int(refusal is None), *mine, *(-number for number in mine)])
    if refusal is not None:
        raise refusal
    if not willing:
        raise OtherRankError("another rank refuses its configuration; its own error says why")
    bounds = zip(values.items(), lowest[: len(mine)], lowest[len(mine) :], strict=True)
    wrong = [_difference(name, value, low, -high) for (name, value), low, high in bounds if low != -high]
    if wrong:
        raise ConfigError(f"ranks differ in {', '.join(wrong)}; make it the same on every rank")


def agreed(agreement: Agreement, what: str, make: Callable[[], MadeT]) -> MadeT:
    """Make something on every rank; where one fails, all raise. A collective.

    Raises:
        OtherRankError: another rank failed.
        BaseException: what `make` raised on this one.
    """
    made, error = None, None
    try:
        made = make()
    except BaseException as failure:  # noqa: BLE001 - raised below, once the other ranks know; drivers call sys.exit
        error = failure
    all_did = agreement.minimum([int(error is None)])[0]
    if error is not None:
        raise error
    if not all_did or made is None:
        raise OtherRankError(f"another rank could not make its {what}")
    return made


def _number(value: object) -> int:
    if isinstance(value, int) and abs(value) <= LARGEST:
        return value
    return LARGEST + 1 + int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])


def _difference(name: str, value: object, low: int, high: int) -> str:
    return f"{name} ({value} here, {low} to {high} in all)" if type(value) is int and high <= LARGEST else name
