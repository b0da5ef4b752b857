"""Read-only check that a slot holds the page that a metadata server lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.hf3fs.slots.scopes import page_key
from hicache_backends.posix.files import read_into
from hicache_storage.objects import ENVELOPE_BYTES
from hicache_storage.objects.namespace import belongs, checksum, key_digest, stored_checksum

if TYPE_CHECKING:
    from hicache_backends.hf3fs.slots.scopes import SlotScope
    from hicache_metadata_server.protocol import SlotStatus


def is_damaged(scope: SlotScope, listed: SlotStatus) -> bool:
    """Return True if a reader would not take the content of a live slot for its page.

    False as well where the slot cannot be read: the page may be whole.
    """
    if not ENVELOPE_BYTES < listed.length <= scope.file.geometry.slot_bytes:
        return True
    content = memoryview(bytearray(listed.length))
    try:
        descriptor = scope.file.borrow().descriptor
        if not read_into(descriptor, [content], scope.file.offset(listed.slot)):
            return True
    except OSError:
        return False
    page, envelope = content[:-ENVELOPE_BYTES], bytes(content[-ENVELOPE_BYTES:])
    digest = key_digest(page_key(listed.key))
    return not belongs(envelope, scope.namespace.envelope_prefix, digest) or not stored_checksum(
        envelope
    ) == listed.checksum == checksum([page])
