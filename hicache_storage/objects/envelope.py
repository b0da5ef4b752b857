"""The 64 bytes that make a stored page self-describing.

```
offset  bytes  field
0       4      magic "HCP2"
4       2      version, little endian, 1
6       2      reserved, 0
8       8      length of the page
16      16     fingerprint of the namespace: identity, pool and geometry
32      16     xxh3_128 of the page key
48      8      generation: differs between any two writes
56      8      xxh3_64 of the page's bytes, components in order
```

Everything before the generation is known to a reader in advance, so that one comparison of bytes
settles it.
"""

from __future__ import annotations

import itertools
import os
import struct
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVELOPE_BYTES = 64
"""Length of an envelope."""
_MAGIC = b"HCP2"
_VERSION = 1
_PREFIX = struct.Struct("<4sHHQ16s")
_SUFFIX = struct.Struct("<QQ")
_PREFIX_END = _PREFIX.size
_KEY_END = _PREFIX_END + 16

# Random start, so that two processes do not write the same generations; the counter keeps one
# process's apart.
_generations = itertools.count(int.from_bytes(os.urandom(8), "little") >> 1)


def _draw_again() -> None:
    """In a forked child: the parent, and its other children, go on from the same number."""
    global _generations
    _generations = itertools.count(int.from_bytes(os.urandom(8), "little") >> 1)


os.register_at_fork(after_in_child=_draw_again)


def envelope_prefix(page_bytes: int, namespace_fingerprint: bytes) -> bytes:
    """The first 32 bytes, equal for all pages of a namespace."""
    return _PREFIX.pack(_MAGIC, _VERSION, 0, page_bytes, namespace_fingerprint)


def seal(prefix: bytes, key_digest: bytes, checksum: int) -> bytes:
    """The envelope of a page that is about to be written."""
    return prefix + key_digest + _SUFFIX.pack(next(_generations) & 0xFFFF_FFFF_FFFF_FFFF, checksum)


def belongs(envelope: bytes | bytearray | memoryview, prefix: bytes, key_digest: bytes) -> bool:
    """Return True if an envelope has the length, namespace and key that the reader expects."""
    return (
        len(envelope) == ENVELOPE_BYTES
        and envelope[:_PREFIX_END] == prefix
        and envelope[_PREFIX_END:_KEY_END] == key_digest
    )


def stored_checksum(envelope: bytes | bytearray | memoryview) -> int:
    """The xxh3_64 that the writer computed."""
    _generation, checksum = _SUFFIX.unpack_from(envelope, _KEY_END)
    return int(checksum)


def running_checksum() -> xxhash.xxh3_64:
    """Make a checksum of a page that comes piece by piece.

    `update()` it with each piece; `intdigest()` then equals `checksum()`.
    """
    return xxhash.xxh3_64()


def checksum(buffers: Sequence[memoryview]) -> int:
    """xxh3_64 of the buffers, one after the other."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    digest = running_checksum()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
