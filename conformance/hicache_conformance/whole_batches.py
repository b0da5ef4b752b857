"""Batches as large as an engine moves them, for measuring: of any bytes, placed the same in each call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.memory import GuardedPool
from hicache_conformance.violation import Untestable, Violation
from hicache_storage.spec import PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.lab import Lab
    from hicache_conformance.subject import Subject
    from hicache_storage.layers import StorageOptions

BATCH: Final = 128
"""Pages of a call, as SGLang batches them."""
LEAST_PAGE_BYTES: Final = 32 << 10


def whole_batches(
    lab: Lab, *, page_bytes: int, batches: int, options: StorageOptions | None = None
) -> tuple[Subject, list[list[PoolTransfer]]]:
    """A storage whose host pool holds one batch, and transfers of several with keys of their own.

    Pages are smaller where the driver stores none of `page_bytes`.

    Raises:
        Untestable: it stores only pages that are too small to measure with.
    """
    import torch

    limit = lab.capabilities.max_page_bytes
    page_bytes = page_bytes if limit is None else min(page_bytes, limit // 2 * 2)
    if page_bytes < LEAST_PAGE_BYTES:
        raise Untestable(
            f"max_page_bytes is {limit}; what a batch costs is measured with pages of {LEAST_PAGE_BYTES} bytes and more"
        )
    memory = GuardedPool(pages=BATCH, page_size=2, components=(page_bytes // 2, page_bytes // 2))
    for page in range(BATCH):
        memory.write(page, lab.random.randbytes(page_bytes))
    subject = lab.storage(pools={PoolName.KV: memory}, options=options)
    slots = torch.arange(2 * BATCH)
    return subject, [[PoolTransfer(PoolName.KV, slots, keys=lab.keys(BATCH))] for _ in range(batches)]


def move(subject: Subject, name: str, transfers: Sequence[PoolTransfer]) -> None:
    """Set or get a batch of KV pages.

    Raises:
        Untestable: the store has no room for it.
        Violation: SET-1, pages are gone from a store that evicts none.
    """
    answer = subject.call(name, lambda: getattr(subject.storage, name)(transfers))[PoolName.KV]
    if all(answer):
        return
    mib = subject.memories[PoolName.KV].page_bytes * BATCH >> 20
    if name == "batch_set_v2" or subject.storage.capabilities.evicts:
        raise Untestable(f"the store has no room for a batch of {mib} MiB; give it more")
    raise Violation("SET-1", f"a get of {BATCH} pages that were stored answered False for {answer.count(False)}")
