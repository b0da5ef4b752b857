"""Lua scripts: their sources, and how arguments and replies are encoded."""

from __future__ import annotations

import hashlib
import struct
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

# First element of a reply.
OK: Final = 0
UNKNOWN: Final = 1
REUSED: Final = 2
REFUSED: Final = 3
EXACT: Final = 1 << 53
"""Lua's numbers are exact below this; no lease and no generation reaches it."""

_WITH_LIVE: Final = ("commit", "confirm")
_ALONE: Final = ("claim", "register")
"""Scripts that are about no scope."""

packed: Final = msgspec.msgpack.Encoder().encode
unpacked: Final = msgspec.msgpack.Decoder().decode


class IdempotencyKey(NamedTuple):
    """Idempotency key of a request and digest of its content; empty for a request without one."""

    key: str = ""
    digest: bytes = b""


NO_IDEMPOTENCY_KEY: Final = IdempotencyKey()


class Script(NamedTuple):
    """Source of a script, and the SHA-1 under which Redis caches it."""

    source: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return a script by its name, with the library code that it needs in front."""
    # Redis has no modules for scripts that every supported version and service permits
    # (functions need Redis 7), so shared code is prepended to each source.
    before = () if name in _ALONE else ("common", "live") if name in _WITH_LIVE else ("common",)
    source = "\n".join(_read(part) for part in (*before, name))
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def exact(numbers: Sequence[int]) -> list[int]:
    """Return numbers that Lua compares exactly: 0, which nothing has, for those beyond `EXACT`."""
    # Above 2**53 a client's made-up lease would be rounded, and could equal somebody's real one.
    return (
        [number if number < EXACT else 0 for number in numbers]
        if max(numbers, default=0) >= EXACT
        else list(numbers)
    )


def pages_of(lengths: Sequence[int], checksums: Sequence[int]) -> bytes:
    """Encode length and checksum of each page as 16 bytes."""
    # Checksums have 64 bits, more than Lua's numbers hold: scripts only compare these bytes.
    flat = [0] * (2 * len(lengths))
    flat[::2] = lengths
    flat[1::2] = checksums
    return struct.pack(f"<{len(flat)}Q", *flat)


def columns_of(pages: bytes) -> tuple[list[int], list[int]]:
    """Decode lengths and checksums."""
    flat = struct.unpack(f"<{len(pages) // 8}Q", pages)
    return list(flat[::2]), list(flat[1::2])


def value_of(reply: list[Any]) -> Any:
    """Decode the value of a reply."""
    return unpacked(reply[1])


def _read(name: str) -> str:
    return files("hicache_metadata_server.shared").joinpath("lua", f"{name}.lua").read_text("utf-8")
