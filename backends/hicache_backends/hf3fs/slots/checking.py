"""Check that a slot holds the page that a metadata server lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.hf3fs.slots.engine import SlotRead
from hicache_backends.hf3fs.slots.scopes import page_key
from hicache_storage.objects import ObjectRead
from hicache_storage.objects.namespace import stored_checksum

if TYPE_CHECKING:
    from hicache_backends.hf3fs.slots.engine import SlotEngine
    from hicache_backends.hf3fs.slots.scopes import SlotScope
    from hicache_metadata_server.protocol import SlotStatus
    from hicache_storage.objects import Call


def is_damaged(engine: SlotEngine, scope: SlotScope, listed: SlotStatus, call: Call) -> bool | None:
    """Read a live slot again, and return True if a reader would not take it for its page.

    None where it cannot be read: the page may be whole.
    """
    if listed.length != scope.namespace.object_bytes:
        return True
    read = ObjectRead.aside(scope.namespace, page_key(listed.key))
    job = SlotRead(read, scope.file, listed.slot)
    engine.read([job], call)
    if job.fault is not None:
        return None
    whole = job.whole and read.verify()
    return not (whole and stored_checksum(read.envelope) == listed.checksum)
