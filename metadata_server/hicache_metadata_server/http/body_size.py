"""How many values a body holds, found out without making any of them.

Decoding takes time by the number of values, not of bytes: 8 MiB can hold four million strings, and
a decoder cannot be interrupted. So a long body is counted first, and counting stops at the limit.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.protocol import MSGPACK

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import Limits

VALUES_PER_ENTRY: Final = 4
"""The most that any request needs: a pair of keys of the compatible part is two texts and two
commas."""
VALUES_PER_SCOPE: Final = 16

# A text that never ends reaches to the end of the body, so that no search begins at each of its
# quotes.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|,', re.DOTALL)


def max_values(limits: Limits) -> int:
    """More than any request within these limits holds."""
    return VALUES_PER_ENTRY * limits.keys + VALUES_PER_SCOPE * limits.scopes + 64


def holds_more_values(body: bytes, content_type: str, most: int) -> bool:
    """Whether a body holds more values than `most`; of JSON, texts and commas are counted."""
    if len(body) <= most:
        return False
    return (
        _msgpack_holds_more(body, most) if content_type == MSGPACK else _json_holds_more(body, most)
    )


def _json_holds_more(body: bytes, most: int) -> bool:
    # Values are parted by commas, so that few commas are few values; many of them may stand in
    # texts.
    if body.count(b",") <= most // 2:
        return False
    return next(itertools.islice(_TOKEN.finditer(body), most, None), None) is not None


def _msgpack_holds_more(body: bytes, most: int) -> bool:
    at, end = 0, len(body)
    for _ in range(most):
        if at >= end:
            return False
        first = body[at]
        if step := _STEPS[first]:
            at += step
        else:
            width, more = _LENGTHS[first]
            at += 1 + width + more + int.from_bytes(body[at + 1 : at + 1 + width])
    return at < end


def _steps() -> bytes:
    """How many bytes a msgpack value takes that begins with each byte, its members apart; 0 where a
    length follows."""
    sizes = bytearray([1] * 256)
    for first in range(0xA0, 0xC0):
        sizes[first] = 1 + (first & 0x1F)
    for first, size in (
        (0xCA, 5),
        (0xCB, 9),
        (0xCC, 2),
        (0xCD, 3),
        (0xCE, 5),
        (0xCF, 9),
        (0xD0, 2),
        (0xD1, 3),
        (0xD2, 5),
        (0xD3, 9),
        (0xD4, 3),
        (0xD5, 4),
        (0xD6, 6),
        (0xD7, 10),
        (0xD8, 18),
        (0xDC, 3),
        (0xDD, 5),
        (0xDE, 3),
        (0xDF, 5),
    ):
        sizes[first] = size
    for first in _LENGTHS:
        sizes[first] = 0
    return bytes(sizes)


_LENGTHS: Final = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
"""Bytes of the length behind the first byte, and bytes beside it, of binaries, extensions and
texts."""
_STEPS: Final = _steps()
