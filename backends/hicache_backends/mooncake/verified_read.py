"""Reads with verification, repeated until damage is certain.

The memory of an object that is removed during a read may hold other objects by then, whose bytes
arrive in the page. That is no damage: a page is damaged if the same wrong bytes arrive twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash

from hicache_storage.objects import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.reader import PageReader, ReadOutcome
    from hicache_storage.objects import Call

ATTEMPTS: Final = 4


def read_verified(
    reader: PageReader, connection: Connection, reads: Sequence[ObjectRead], call: Call
) -> ReadOutcome:
    """Read and verify pages. A page that remains damaged in the result is damaged in the store.

    Raises:
        StorageUnavailableError: the master does not answer.
    """
    outcome = reader.read(connection, reads, call)
    before = dict[ObjectRead, bytes]()
    doubtful = _not_verified(outcome.arrived, call)
    for _ in range(ATTEMPTS):
        # The same wrong bytes twice: such a page stays in the result, as damaged.
        settled = {read for read, content in doubtful.items() if before.get(read) == content}
        again = [read for read in doubtful if read not in settled]
        if not again or call.expired():
            break
        for read in again:
            read.retract()
            outcome.arrived.discard(read)
        before = doubtful
        more = reader.read(connection, again, call)
        outcome.arrived |= more.arrived
        outcome.faults += more.faults
        doubtful = _not_verified(more.arrived, call)
    else:
        again = list(doubtful)
    for read in again:
        # Neither a hit nor certainly damaged: a miss.
        read.retract()
        outcome.arrived.discard(read)
    return outcome


def _not_verified(reads: set[ObjectRead], call: Call) -> dict[ObjectRead, bytes]:
    """Map the arrived reads that fail verification to digests of their bytes."""
    # A cancelled call's memory is its caller's again: what is there now says nothing about the
    # store.
    with call.shield() as active:
        return {read: _digest(read) for read in reads if not read.verify()} if active else {}


def _digest(read: ObjectRead) -> bytes:
    digest = xxhash.xxh3_128()
    for part in read.parts:
        digest.update(part)
    return digest.digest()
