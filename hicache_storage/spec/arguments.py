"""Checks of single arguments and options: numbers of seconds, lists, and page keys."""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Final, TypeGuard, cast

from hicache_storage.spec.errors import ConfigError, InvalidTransferError
from hicache_storage.spec.transfers import MAX_KEY_BYTES

MAX_SECONDS: Final = threading.TIMEOUT_MAX
"""Longest time that a lock, a condition or a queue of Python can wait."""


def as_deadline(seconds: object) -> float:
    """Check a call's `deadline_seconds`, and return it as a float.

    0 and less have passed already; what is too long is cut down by the storage.

    Raises:
        InvalidTransferError: it is no number, or NaN.
    """
    if not _is_number(seconds) or seconds != seconds:  # noqa: PLR0124 - NaN, of whichever type of number
        raise InvalidTransferError(
            "deadline_seconds must be a number of seconds from now, or None for the storage's own "
            f"deadline, got {seconds!r:.80}"
        )
    try:
        return float(seconds)
    except OverflowError:
        # An integer that no float can hold.
        return math.inf if seconds > 0 else -math.inf


def check_seconds(name: str, seconds: object) -> None:
    """Check an option that is a time to wait.

    Raises:
        ConfigError: it is no finite number, not more than 0, or longer than a thread can wait.
    """
    if not (_is_number(seconds) and 0 < seconds <= MAX_SECONDS):
        raise ConfigError(
            f"{name} must be a number of seconds, positive and {MAX_SECONDS:.0f} at most, got "
            f"{seconds!r:.80}"
        )


def check_list(value: object, where: str, what: str = "page keys") -> None:
    """Check that an argument can be counted and iterated over more than once.

    A list or a tuple can; a text is refused.

    Raises:
        InvalidTransferError: it is None, one text, or something else that is no sequence, such as
            an iterator or an array.
    """
    kind = type(value)
    # The common cases; the check against the abstract class below takes three times as long.
    if kind is list or kind is tuple:
        return
    if value is None:
        raise InvalidTransferError(f"{where} is None; pass the {what}, or an empty list")
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        raise InvalidTransferError(f"{where} is one text; pass a list of {what}")
    if not isinstance(value, Sequence):
        raise InvalidTransferError(
            f"{where} must be a list of {what}, got {kind.__name__}; pass list(...) of it"
        )


def check_keys(keys: Sequence[str], where: str = "keys") -> None:
    """Check that an argument is a list of keys, and that every key is legal (rule ID-5).

    Raises:
        InvalidTransferError: it is no list; or a key is no text, longer than 512 bytes of UTF-8, or
            contains NUL or a lone surrogate.
    """
    check_list(keys, where)
    try:
        # One test of the joined text in place of one for each key: a call may have 250,000 keys
        # (rule EX-10), nearly always of hexadecimal digits.
        joined = "".join(keys)
    except TypeError:
        wrong = next(key for key in cast("Sequence[object]", keys) if not isinstance(key, str))
        raise InvalidTransferError(
            f"{where} must be text, got {type(wrong).__name__}: {wrong!r:.80}"
        ) from None
    if joined.isascii() and "\0" not in joined and max(map(len, keys), default=0) <= MAX_KEY_BYTES:
        return
    for key in keys:
        try:
            length = len(key.encode())
        except UnicodeEncodeError as error:
            raise InvalidTransferError(
                f"key {key!r:.80} has a lone surrogate and cannot be stored"
            ) from error
        if length > MAX_KEY_BYTES:
            raise InvalidTransferError(
                f"key {key!r:.80} has {length} bytes; at most {MAX_KEY_BYTES} are legal"
            )
        if "\0" in key:
            raise InvalidTransferError(f"key {key!r:.80} contains NUL")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is nearest to a wrong one; empty if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_number(value: object) -> TypeGuard[float]:
    # A bool is an `int` and thus a `Real`, but `True` is not a number of seconds.
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
