"""The file driver: pages in bundles below a shared directory."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.plugin import CAPABILITIES
from hicache_backends.file.store import Store
from hicache_backends.file.writer import PendingBundle
from hicache_backends.posix.faults import FULL
from hicache_storage.objects import Namespace, ObjectRead, ObjectStorage
from hicache_storage.spec import Durability, Health, HungReads, RemovalReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_backends.file.capacity import Capacity
    from hicache_backends.file.config import FileConfig
    from hicache_backends.file.page_index import Extent, Location, PageIndex
    from hicache_storage.objects import (
        Call,
        LookupBatch,
        ObjectRemoval,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.spec import StorageIdentity

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 13
"""Limit on reading pages whose bundles are rewritten while a call uses them.

Every other process may rewrite one once.
"""

MAX_CLEAR_ATTEMPTS = 64
"""Limit on listing again because others have removed or rewritten a bundle meanwhile.

Each attempt that fails is one in which another process got on with a clear of its own or a rewrite.
"""


class FileStorage(ObjectStorage):
    """Stores pages as files.

    Pages for which a set has answered `True` are found by the next call of any storage on the same
    directory, in any process or node, and survive the death of all of them. Several storages may
    read, write, evict and delete at the same time.
    """

    caches_lookups = True
    caches_reads = True

    def __init__(self, identity: StorageIdentity, config: FileConfig) -> None:
        super().__init__(
            identity,
            driver_name="file",
            capabilities=replace(
                CAPABILITIES,
                durability=Durability.MACHINE if config.fsync else Durability.PROCESS,
                evicts=config.capacity is not None or config.leaves_room,
            ),
            verifies_checksums=config.verify_checksums,
        )
        self._config = config
        self._removed: list[ObjectRemoval] = []
        """Taken from page indexes, and not yet returned."""
        self._removed_lost = False

    def connect(self) -> None:
        self.store = Store(self._config, self.recorder)
        """The open store: the SDK makes no call before this one, and none after `disconnect`."""
        # Known only now: the path alone does not tell the file system.
        hangs = self.store.buffers is not None
        self._capabilities = replace(
            self._capabilities,
            may_hang=hangs,
            hung_reads=HungReads.BOUNCE_BUFFER if hangs else HungReads.WAIT,
        )
        # Across a network even the change counter takes a request.
        self.caches_lookups = self.store.is_local
        self.caches_reads = self.store.reader.on_disk

    def disconnect(self) -> None:
        self.store.close()

    def check_health(self) -> Health:
        store, limit = self.store, self._config.capacity_bytes
        namespaces = [part.namespace for pool in self.pools.values() for part in pool.parts]
        page_indexes = store.page_indexes(namespaces, expired=lambda: True)
        reasons = store.refusals() + [
            f"pages of pool {pool.name} are larger than the capacity"
            for pool in self.pools.values()
            if limit is not None and pool.namespace.object_bytes > limit
        ]
        ignored = store.ignored()
        found = [f"{ignored} damaged bundles ignored"] if ignored else []
        return Health(
            # Where nothing is stored and nothing can be, nothing can be served.
            ok=not (reasons and namespaces)
            or any(page_index.bundle_set.bundles for page_index in page_indexes),
            detail="; ".join(reasons + found),
            writable=not reasons,
        )

    def objects_exist_cached(
        self, batches: Sequence[LookupBatch], call: Call
    ) -> list[list[bool]] | None:
        store = self.store
        page_indexes = store.cached_page_indexes([batch.namespace for batch in batches])
        if page_indexes is None:
            return None
        self._touch(page_indexes, (batch.keys for batch in batches), call)
        return _contained(page_indexes, batches)

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        store = self.store
        page_indexes = store.page_indexes([batch.namespace for batch in batches], call.expired)
        self._touch(page_indexes, (batch.keys for batch in batches), call)
        store.after_call()
        return _contained(page_indexes, batches)

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        store, loaded, faults = self.store, set[ObjectRead](), list[OSError]()
        namespaces = [batch.namespace for batch in batches]
        page_indexes = store.page_indexes(namespaces, call.expired)
        self._touch(page_indexes, ([read.key for read in batch.reads] for batch in batches), call)
        reads: Sequence[Sequence[ObjectRead]] = [batch.reads for batch in batches]
        for _ in range(MAX_ATTEMPTS):
            outcome = store.reader.read(_extents(page_indexes, reads), call)
            loaded.update(outcome.loaded)
            faults += outcome.faults
            if not outcome.gone:
                break
            # Rewritten or evicted by another process; a listing finds them if they still exist.
            for namespace in {extent.bundle.namespace for extent in outcome.gone}:
                store.bundle_sets.get(namespace).invalidate()
            again = {read for extent in outcome.gone for read in extent.reads}
            reads = [[read for read in some if read in again] for some in reads]
            page_indexes = store.page_indexes(namespaces, call.expired)
        else:
            faults.append(OSError(errno.ESTALE, "bundles are rewritten faster than they are read"))
        store.after_call()
        self.note_partial_faults(faults, served=bool(loaded))
        return [[read in loaded for read in batch.reads] for batch in batches]

    def read_objects_cached(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        store = self.store
        page_indexes = store.cached_page_indexes([batch.namespace for batch in batches])
        if page_indexes is None:
            return False
        extents = _extents(page_indexes, [batch.reads for batch in batches])
        if sum([len(extent.reads) for extent in extents]) < sum(
            [len(batch.reads) for batch in batches]
        ):
            return False
        if not store.reader.read_cached(extents, call):
            return False
        self._touch(page_indexes, ([read.key for read in batch.reads] for batch in batches), call)
        store.after_call()
        return True

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        store = self.store
        # The SDK has just looked up the pages; a second copy published since does no harm.
        page_indexes = store.known_page_indexes([batch.namespace for batch in batches])
        for page_index in page_indexes:
            store.publisher.prepare(page_index)
        pending_bundles = self._plan_writes(batches, page_indexes, call)
        self._write_all(pending_bundles, call)
        published = store.publisher.publish(pending_bundles, call)
        stored = {write for pending, _ in published for write in pending.writes}
        if store.capacity is not None:
            for page_index in page_indexes:
                page_index.touch_bundles(
                    [bundle for pending, bundle in published if pending.page_index is page_index]
                )
                # A head that is older than its tail would be evicted before it.
                page_index.touch(call.prefix_keys)
        store.after_call()
        self.note_partial_faults(
            [pending.fault for pending in pending_bundles if pending.fault], served=bool(stored)
        )
        return [[write in stored for write in batch.writes] for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        store = self.store
        page_indexes = store.page_indexes([batch.namespace for batch in batches], call.expired)
        # Another thread may have found more bundles since.
        while not all(page_index.complete for page_index in page_indexes):
            if call.expired():
                raise TimeoutError("the deadline has passed, and indexes are still unread")
            page_indexes = store.page_indexes([batch.namespace for batch in batches], call.expired)
        found = _contained(page_indexes, batches)
        for page_index, batch in zip(page_indexes, batches, strict=True):
            if call.expired():
                raise TimeoutError("the deadline of the delete has passed")
            find = partial(_locations, page_index, batch.keys)
            store.rewriter.drop_all(page_index, find, RemovalReason.DELETED)
        store.feed.announce(always_advance=not all(map(all, found)))
        store.after_call()
        return found

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        store = self.store
        for _ in range(MAX_CLEAR_ATTEMPTS):
            for namespace in namespaces:
                store.bundle_sets.get(namespace.name).invalidate()
            # Whole bundles are removed, so no index needs to be read.
            if self._clear_listed(store.page_indexes(namespaces, expired=lambda: True), call):
                store.after_call()
                return
        raise FileNotFoundError("others keep on rewriting the bundles that are to be cleared")

    def described_namespaces(self) -> list[Namespace]:
        paths = self.store.paths
        return Namespace.read_all(map(paths.description, paths.namespaces()))

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        store = self.store
        page_indexes = store.page_indexes([batch.namespace for batch in batches], call.expired)
        for page_index, batch in zip(page_indexes, batches, strict=True):
            find = partial(_damaged, page_index, batch.reads)
            store.rewriter.drop_all(page_index, find, RemovalReason.DAMAGED)
        # Where an older copy may be in a bundle whose index is unread, the SDK hides the page until
        # the next set has written it anew.
        return all(page_index.complete for page_index in page_indexes)

    def collect_removals(
        self, namespaces: Sequence[Namespace], call: Call
    ) -> tuple[list[ObjectRemoval], bool]:
        store = self.store
        page_indexes = store.known_page_indexes(namespaces)
        for page_index in page_indexes:
            page_index.watch()
        store.page_indexes(namespaces, call.expired)
        for page_index in page_indexes:
            while (taken := page_index.take_removed()) is None:
                if call.expired():
                    raise TimeoutError("the deadline has passed, and indexes are still unread")
                store.page_indexes([page_index.namespace], call.expired)
            self._removed += taken[0]
            self._removed_lost |= taken[1]
        store.after_call()
        removed, lost = self._removed, self._removed_lost
        self._removed = []
        self._removed_lost = False
        return removed, lost

    def recall_removals(self, batches: Sequence[LookupBatch], call: Call) -> list[ObjectRemoval]:
        removed = [
            one
            for batch in batches
            for one in self.store.feed.history.recall(batch.namespace.name, batch.keys)
        ]
        return sorted(removed, key=lambda one: one.seconds)

    def _touch(
        self, page_indexes: Sequence[PageIndex], keys: Iterable[Sequence[str]], call: Call
    ) -> None:
        """With a capacity, record a use of pages and of the prefix of a call."""
        if self.store.capacity is not None:
            for page_index, some in zip(page_indexes, keys, strict=True):
                page_index.touch([*call.prefix_keys, *some])

    def _clear_listed(self, page_indexes: Sequence[PageIndex], call: Call) -> bool:
        """Remove all bundles that are known.

        Returns:
            `False` if another process may have replaced one meanwhile.

        Raises:
            OSError: some are still there; `TimeoutError` if the deadline has passed.
        """
        outcomes = list[bool | OSError]()
        for page_index in page_indexes:
            bundle_set = page_index.bundle_set
            # Not beyond the deadline: the caller has been answered, and may store pages anew.
            outcomes += self.store.publisher.remove(
                bundle_set,
                list(bundle_set.bundles.values()),
                RemovalReason.CLEARED,
                call.expired,
            )
        self.store.feed.announce(always_advance=True)
        for outcome in outcomes:
            # A directory with the name of a bundle holds no page.
            if isinstance(outcome, OSError) and not isinstance(outcome, IsADirectoryError):
                raise outcome
        return all(outcomes)

    def _plan_writes(
        self, batches: Sequence[WriteBatch], page_indexes: Sequence[PageIndex], call: Call
    ) -> list[PendingBundle]:
        """Plan the bundles to be written, and make room for them.

        Those that get none have a fault.
        """
        store, pending_bundles = self.store, list[PendingBundle]()
        limit = None if store.capacity is None else store.capacity.limit
        for batch, page_index in zip(batches, page_indexes, strict=True):
            planned = store.writer.plan(page_index, batch.writes, limit)
            pending_bundles += planned
            if limit is not None:
                limit -= sum(pending.name.size for pending in planned)
        if store.capacity is None:
            return pending_bundles
        size = sum([pending.name.size for pending in pending_bundles])
        if not store.capacity.has_room(size):
            for page_index in page_indexes:
                page_index.touch(call.prefix_keys)
            for pending in pending_bundles:
                store.writer.open(pending)
            self._make_room(store.capacity, pending_bundles, call)
        store.capacity.free.take(size)
        return pending_bundles

    def _make_room(
        self, capacity: Capacity, pending_bundles: Sequence[PendingBundle], call: Call
    ) -> None:
        """Make room for bundles, as `Capacity.make_room` does, and refuse those that get none."""
        discard = self.store.writer.discard
        try:
            excess = capacity.make_room(call.expired)
        except BaseException:
            # Any error: the bundles hold reservations and open files.
            for pending in pending_bundles:
                discard(pending)
            raise
        for pending in reversed(pending_bundles):
            if excess <= 0:
                break
            excess -= pending.name.size
            discard(pending, str(capacity))

    def _write_all(self, pending_bundles: Sequence[PendingBundle], call: Call) -> None:
        write, capacity = partial(self.store.writer.write, call=call), self.store.capacity
        self.store.thread_pool.run([partial(write, pending) for pending in pending_bundles])
        short = [
            pending.name.size
            for pending in pending_bundles
            if isinstance(pending.fault, OSError) and pending.fault.errno in FULL
        ]
        if capacity is not None and short:
            try:
                capacity.note_full(sum(short), call.expired)
            except OSError as error:
                logger.debug("cannot make room on a full disk: %s", error)


def _contained(
    page_indexes: Sequence[PageIndex], batches: Sequence[LookupBatch]
) -> list[list[bool]]:
    """For each batch, for each key, `True` if a bundle holds the page."""
    # The shards of a pool are asked for the same keys. Mostly all are there, and one comparison of
    # sets takes half the time of a test for each key.
    keys = batches[0].keys if len(batches) > 1 else ()
    distinct = set(keys)
    return [
        [True] * len(keys)
        if batch.keys is keys and page_index.pages.keys() >= distinct
        else list(map(page_index.pages.__contains__, batch.keys))
        for page_index, batch in zip(page_indexes, batches, strict=True)
    ]


def _extents(
    page_indexes: Sequence[PageIndex], reads: Sequence[Sequence[ObjectRead]]
) -> list[Extent]:
    return [
        extent
        for page_index, some in zip(page_indexes, reads, strict=True)
        for extent in page_index.locate(some)
    ]


def _locations(page_index: PageIndex, keys: Sequence[str]) -> list[Location]:
    return [location for key in keys for location in page_index.copies(key)]


def _damaged(page_index: PageIndex, reads: Sequence[ObjectRead]) -> list[Location]:
    """Find the copies that were read, and older ones, which would take their places.

    A copy that has been written since has another envelope, and stays.
    """
    damaged: list[Location] = []
    for read in reads:
        copies = page_index.copies(read.key)
        envelopes = [bundle.envelope(page) for bundle, page in copies]
        if read.envelope in envelopes:
            damaged += copies[envelopes.index(bytes(read.envelope)) :]
    return damaged
