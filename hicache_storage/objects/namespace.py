"""Namespaces: names of a pool's pages in a store, derived from identity, pool and geometry."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import msgspec
import xxhash

from hicache_storage.objects.envelope import ENVELOPE_BYTES, envelope_prefix
from hicache_storage.spec import MAX_KEY_BYTES, InvalidTransferError
from hicache_storage.spec.arguments import check_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import PageGeometry, PoolName, StorageIdentity


class Namespace:
    """All pages of one identity, one pool and one page geometry.

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
    )

    def __init__(self, identity: StorageIdentity, pool: PoolName, geometry: PageGeometry) -> None:
        self.identity = identity
        self.pool = pool
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes
        """Length of every page in here, without its envelope."""
        self.object_bytes = self.page_bytes + ENVELOPE_BYTES
        """Length of every stored object in here; one of another length is damaged."""
        self.fingerprint = _fingerprint(identity, pool, geometry)
        """16 bytes; equal for two processes exactly when they may share pages."""
        self.name = self.fingerprint.hex()
        """32 characters of `[0-9a-f]`; safe as a directory or a key prefix."""
        self.envelope_prefix = envelope_prefix(self.page_bytes, self.fingerprint)

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
                for name, value in self.identity.deciding_fields(self.pool).items()
            },
        }


def key_digest(key: str) -> bytes:
    """Return 16 bytes that go into the envelope, to notice another key's bytes.

    Not for names: xxh3 is not collision-proof.
    """
    return xxhash.xxh3_128_digest(key.encode())


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


def _fingerprint(identity: StorageIdentity, pool: PoolName, geometry: PageGeometry) -> bytes:
    # Without `geometry.size`: pools with different numbers of slots share their pages.
    shape = (geometry.layout, geometry.dtype, geometry.page_size, geometry.component_bytes)
    digest = hashlib.blake2b(digest_size=16, person=b"hicache-space-v2")
    digest.update(identity.fingerprint(pool))
    digest.update(msgspec.json.encode(shape))
    return digest.digest()
