"""`ObjectStorage` and what its drivers are handed."""

from hicache_storage.objects.batches import (
    Call,
    LookupBatch,
    ObjectRead,
    ObjectWrite,
    ReadBatch,
    WriteBatch,
)
from hicache_storage.objects.namespace import (
    ENVELOPE_BYTES,
    Namespace,
    checksum,
    running_checksum,
)
from hicache_storage.objects.removals import ObjectRemoval, this_process
from hicache_storage.objects.requests import RegisteredPool
from hicache_storage.objects.storage import ObjectStorage
from hicache_storage.objects.thread_pool import ThreadPool

__all__ = [
    "ENVELOPE_BYTES",
    "Call",
    "LookupBatch",
    "Namespace",
    "ObjectRead",
    "ObjectRemoval",
    "ObjectStorage",
    "ObjectWrite",
    "ReadBatch",
    "RegisteredPool",
    "ThreadPool",
    "WriteBatch",
    "checksum",
    "running_checksum",
    "this_process",
]
