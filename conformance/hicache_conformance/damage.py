"""Damaged objects, written below the API through the driver's own `write_objects`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from hicache_storage.layers import innermost
from hicache_storage.objects import Call, ObjectStorage, ObjectWrite, WriteBatch
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_storage.objects import Namespace
    from hicache_storage.spec import HiCacheStorage


class Damage(StrEnum):
    """What is wrong with an object."""

    SHORT = "short"
    """Its last component is too short."""
    LONG = "long"
    """Its last component is too long."""
    FLIPPED_BIT = "flipped bit"
    """One bit of its bytes differs from what was sealed."""
    OTHER_KEY = "other key"
    """It is another key's page, whole and sealed."""
    OTHER_IDENTITY = "other identity"
    """It is a page of this key and another identity, whole and sealed."""


def can_tamper(storage: HiCacheStorage) -> bool:
    """Whether `tamper_with_objects` knows a way into this storage."""
    return isinstance(innermost(storage), ObjectStorage)


def tamper_with_objects(storage: HiCacheStorage, pool: str, key: str, damage: Damage) -> bool:
    """Put a damaged object in the place of a page, whether there is one or not.

    Returns:
        Whether the object is there now. A driver that refuses to store an object of the wrong length cannot hold one.
    """
    driver = innermost(storage)
    assert isinstance(driver, ObjectStorage)
    namespace = driver.pools[PoolName(pool)].namespace
    try:
        written = driver.write_objects([WriteBatch(namespace, [_damaged(namespace, key, damage)])], Call())
    except Exception:  # noqa: BLE001 - whatever a driver says to an impossible object, it does not hold it
        return False
    return written == [[True]]


def _damaged(namespace: Namespace, key: str, damage: Damage) -> ObjectWrite:
    buffers = [memoryview(bytearray(b"\x5a" * length)) for length in namespace.geometry.component_bytes]
    honest = ObjectWrite(namespace, key, buffers)
    match damage:
        case Damage.SHORT:
            return _Forgery(honest, [*buffers[:-1], buffers[-1][: len(buffers[-1]) // 2]], honest.envelope)
        case Damage.LONG:
            # At the front, so that a store that cuts objects to length is not left with the honest page.
            return _Forgery(honest, [*buffers[:-1], memoryview(b"more" + bytes(buffers[-1]))], honest.envelope)
        case Damage.FLIPPED_BIT:
            sealed, flipped = honest.envelope, bytearray(buffers[-1])
            flipped[len(flipped) // 2] ^= 1
            return _Forgery(honest, [*buffers[:-1], memoryview(flipped)], sealed)
        case Damage.OTHER_KEY:
            return _Forgery(honest, buffers, ObjectWrite(namespace, f"{key}'", buffers).envelope)
        case Damage.OTHER_IDENTITY:
            envelope = bytearray(honest.envelope)
            # The fingerprint of the namespace, by the format that docs/spec.md gives.
            envelope[16:32] = bytes(byte ^ 0xFF for byte in envelope[16:32])
            return _Forgery(honest, buffers, bytes(envelope))


def forged(honest: ObjectWrite, buffers: list[memoryview]) -> ObjectWrite:
    """A write of other bytes under the envelope of the honest one."""
    return _Forgery(honest, buffers, honest.envelope, replaces=honest.replaces)


class _Forgery(ObjectWrite):
    """An object whose envelope does not say the truth about its bytes."""

    __slots__ = ()

    def __init__(self, honest: ObjectWrite, buffers: list[memoryview], envelope: bytes, *, replaces: bool = True) -> None:
        super().__init__(honest.namespace, honest.key, buffers, replaces=replaces)
        self._envelope = envelope

    def seal(self, computed: int) -> None:
        """Leave the envelope as it is; the checksum that a driver has computed is that of the wrong bytes."""
