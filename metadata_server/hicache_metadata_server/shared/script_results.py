"""What scripts are given, and what they say."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

OK: Final = 0
UNKNOWN: Final = 1
REUSED: Final = 2
REFUSED: Final = 3
EXACT: Final = 1 << 53
"""Lua's numbers are exact below this; there are no leases and generations beyond."""

packed: Final = msgspec.msgpack.Encoder().encode
unpacked: Final = msgspec.msgpack.Decoder().decode


class IdempotencyKey(NamedTuple):
    """The idempotency key of a request, and the digest by which it is told apart; empty where it
    has none."""

    key: str = ""
    digest: bytes = b""


NO_IDEMPOTENCY_KEY: Final = IdempotencyKey()


def exact(numbers: Sequence[int]) -> list[int]:
    """Numbers as scripts can compare them: 0, which nothing has, for those that are too large."""
    return (
        [number if number < EXACT else 0 for number in numbers]
        if max(numbers, default=0) >= EXACT
        else list(numbers)
    )


def pages_of(lengths: Sequence[int], checksums: Sequence[int]) -> bytes:
    """Length and checksum of each page, as scripts keep them: 16 bytes that they only compare."""
    flat = [0] * (2 * len(lengths))
    flat[::2], flat[1::2] = lengths, checksums
    return struct.pack(f"<{len(flat)}Q", *flat)


def columns_of(pages: bytes) -> tuple[list[int], list[int]]:
    """Lengths and checksums."""
    flat = struct.unpack(f"<{len(pages) // 8}Q", pages)
    return list(flat[::2]), list(flat[1::2])


def value_of(reply: list[Any]) -> Any:
    """What a script has packed."""
    return unpacked(reply[1])
