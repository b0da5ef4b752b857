"""Number of values in a body, counted without decoding it.

The time to decode a body depends on its values, not on its bytes: 8 MiB can hold four million
strings, and a decoder cannot be interrupted. So the values of a long body are counted first, and
counting stops at the limit.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.protocol import MSGPACK

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import Limits

VALUES_PER_ENTRY: Final = 4
"""Maximum of any request: a pair of keys of the SGLang protocol is two strings and two commas."""
VALUES_PER_SCOPE: Final = 16

# An unterminated string matches up to the end of the body. Without that, and without possessive
# quantifiers, each of its quotes would start another scan of the rest: quadratic time.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|,', re.DOTALL)


def max_values(limits: Limits) -> int:
    """Upper bound on the values of any request within the limits."""
    return VALUES_PER_ENTRY * limits.keys + VALUES_PER_SCOPE * limits.scopes + 64


def exceeds_values(body: bytes, content_type: str, limit: int) -> bool:
    """Return True if a body has more than `limit` values (JSON: strings and commas)."""
    # Each value takes a byte at least, so that short bodies need no count.
    if len(body) <= limit:
        return False
    return _msgpack_exceeds(body, limit) if content_type == MSGPACK else _json_exceeds(body, limit)


def _json_exceeds(body: bytes, limit: int) -> bool:
    # Values are separated by commas, so few commas mean few values. Many commas may be part of
    # strings, and need the slower count.
    if body.count(b",") <= limit // 2:
        return False
    return next(itertools.islice(_TOKEN.finditer(body), limit, None), None) is not None


def _msgpack_exceeds(body: bytes, limit: int) -> bool:
    at, end = 0, len(body)
    # Nesting needs no stack: members follow their container and are counted like other values.
    for _ in range(limit):
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
    """Size of a msgpack value by its first byte; 0 if a length field follows."""
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
"""Width of the length field, and further header bytes, of binaries, extensions and strings."""
_STEPS: Final = _steps()
