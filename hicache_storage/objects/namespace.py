"""Namespaces, and the envelope that ties a stored page to its namespace and key.

An envelope is 64 bytes, which are stored with each page:

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

import contextlib
import hashlib
import itertools
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from hicache_storage.spec import HiCacheError, PageGeometry, PoolName, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class Namespace:
    """All pages of one identity, one pool, or one shard of it, and one page geometry.

    They are interchangeable with each other.

    Two namespaces are the same place exactly when their `name` is equal. Drivers keep namespaces
    apart by that name and keep the pages of one apart by their keys.
    """

    __slots__ = (
        "envelope_prefix",
        "fingerprint",
        "geometry",
        "identity",
        "name",
        "object_bytes",
        "page_bytes",
        "pool",
        "shard",
    )

    def __init__(
        self,
        identity: StorageIdentity,
        pool: PoolName,
        geometry: PageGeometry,
        shard: int | None = None,
    ) -> None:
        self.identity = identity
        self.pool = pool
        self.shard = shard
        """Number of the shard; None for a pool that is not stored in shards."""
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes
        """Length of every page in here, without its envelope."""
        self.object_bytes = self.page_bytes + ENVELOPE_BYTES
        """Length of every stored object in here; one of another length is damaged."""
        self.fingerprint = _fingerprint(identity, pool, geometry, shard)
        """16 bytes; equal for two processes exactly when they may share pages."""
        self.name = self.fingerprint.hex()
        """32 characters of `[0-9a-f]`; safe as a directory or a key prefix."""
        self.envelope_prefix = envelope_prefix(self.page_bytes, self.fingerprint)

    @classmethod
    def read_all(cls, paths: Iterable[str]) -> list[Namespace]:
        """Read descriptions of namespaces, as `describe()` has made them.

        A file that is none is left out, and so is one without the name of its namespace in its
        path: the fingerprint is computed from what the file says.
        """
        found = list[Namespace]()
        for path in paths:
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError, HiCacheError):
                namespace = cls._described(
                    msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
                )
                if namespace.name in path:
                    found.append(namespace)
        return found

    @classmethod
    def _described(cls, about: dict[str, Any]) -> Namespace:
        pool, shard = PoolName(about["pool"]), about.get("identity.shard_start")
        fields = {
            name.removeprefix("identity."): value
            for name, value in about.items()
            if name.startswith("identity.") and not name.startswith("identity.shard_")
        }
        if shard is not None:
            # Any rank that holds the shard: here it is the only one.
            fields |= {"tp_rank": shard, "tp_size": fields["store_tp_size"]}
        replicated = shard is None and "tp_rank" not in fields
        identity = StorageIdentity(
            **fields,
            # Other pools may be in these sets, too, which decides nothing here.
            tp_replicated_pools=frozenset([pool] if replicated else []),
            tp_sharded_pools=frozenset([] if replicated or shard is not None else [pool]),
        )
        geometry = PageGeometry(
            layout=about["layout"],
            dtype=about["dtype"],
            page_size=about["page_size"],
            size=about["page_size"],
            component_bytes=tuple(about["component_bytes"]),
        )
        return cls(identity, pool, geometry, shard)

    def object_name(self, key: str) -> str:
        """Return a name for stores with one flat set of names.

        73 characters of `[0-9a-f-]`, distinct for distinct keys.
        """
        # 160 bits of a cryptographic hash: two keys of one name would be one object in the store.
        return f"{self.name}-{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def describe(self) -> dict[str, object]:
        """Describe a namespace for operators, beside its data.

        Pool, geometry, and the fields that decide about sharing.
        """
        geometry = self.geometry
        return {
            "pool": str(self.pool),
            "layout": geometry.layout,
            "dtype": geometry.dtype,
            "page_size": geometry.page_size,
            "page_bytes": self.page_bytes,
            "component_bytes": list(geometry.component_bytes),
            **{
                f"identity.{name}": value
                for name, value in self.identity.deciding_fields(self.pool, self.shard).items()
            },
        }


def _fingerprint(
    identity: StorageIdentity, pool: PoolName, geometry: PageGeometry, shard: int | None
) -> bytes:
    # Without `geometry.size`: pools with different numbers of slots share their pages.
    shape = (geometry.layout, geometry.dtype, geometry.page_size, geometry.component_bytes)
    digest = hashlib.blake2b(digest_size=16, person=b"hicache-space-v2")
    digest.update(identity.fingerprint(pool, shard))
    digest.update(msgspec.json.encode(shape))
    return digest.digest()


def key_digest(key: str) -> bytes:
    """Return 16 bytes that go into the envelope, to notice another key's bytes.

    Not for names: xxh3 is not collision-proof.
    """
    return xxhash.xxh3_128_digest(key.encode())


def envelope_prefix(page_bytes: int, namespace_fingerprint: bytes) -> bytes:
    """The first 32 bytes, equal for all pages of a namespace."""
    return _PREFIX.pack(_MAGIC, _VERSION, 0, page_bytes, namespace_fingerprint)


def seal(prefix: bytes, key: str, checksum: int) -> bytes:
    """The envelope of a page that is about to be written."""
    generation = next(_generations) & 0xFFFF_FFFF_FFFF_FFFF
    return prefix + key_digest(key) + _SUFFIX.pack(generation, checksum)


def belongs(envelope: bytes | bytearray | memoryview, prefix: bytes, key_digest: bytes) -> bool:
    """Return True if an envelope has the length, namespace and key that the reader expects."""
    return (
        len(envelope) == ENVELOPE_BYTES
        and envelope[:_PREFIX_END] == prefix
        and envelope[_PREFIX_END:_KEY_END] == key_digest
    )


def mismatch(envelope: bytes | bytearray | memoryview, prefix: bytes, key_digest: bytes) -> str:
    """Name the first field in which an envelope differs from what the reader expects.

    Empty where `belongs` is True.
    """
    if len(envelope) != ENVELOPE_BYTES or bytes(envelope[:4]) != _MAGIC:
        return "whose envelope is missing or overwritten"
    expected = _PREFIX.unpack(prefix)
    found = _PREFIX.unpack_from(envelope)
    if found[1:3] != expected[1:3]:
        return f"whose envelope has version {found[1]}"
    if found[3] != expected[3]:
        return f"whose envelope belongs to a page of another length: {found[3]} bytes, not {expected[3]}"
    if found[4] != expected[4]:
        return "whose envelope belongs to another identity, pool or geometry"
    if envelope[_PREFIX_END:_KEY_END] != key_digest:
        return "whose envelope belongs to another key"
    return ""


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
