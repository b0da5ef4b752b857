"""The file driver: pages in bundles below a directory that any number of processes and nodes share."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.inspection import Inspection
from hicache_backends.file.store import Store
from hicache_backends.file.writer import Draft
from hicache_backends.posix.faults import kept
from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import Capabilities, Durability, Health, HungReads, Sharing, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_backends.file.catalog import Catalog, Location, Run
    from hicache_backends.file.config import FileConfig
    from hicache_storage.objects import Call, LookupBatch, Namespace, ObjectRead, ObjectWrite, ReadBatch, WriteBatch
    from hicache_storage.objects.requests import RegisteredPool
    from hicache_storage.spec import StorageIdentity

logger = logging.getLogger(__name__)

ATTEMPTS = 12
"""A bundle that is rewritten while a call uses it is looked up again; others may rewrite it as often as there are of them."""

CLEARING_ATTEMPTS = 8


class FileStorage(ObjectStorage):
    """Stores pages as files.

    What a set has answered `True` for is seen by the next call of any storage on the same directory, in any process or
    node, and survives the death of all of them. Several storages may read, write, evict and delete at the same time.
    """

    caches_lookups = True
    caches_reads = True

    def __init__(self, identity: StorageIdentity, config: FileConfig) -> None:
        super().__init__(
            identity,
            driver_name="file",
            capabilities=Capabilities(
                sharing=Sharing.PROCESSES,
                durability=Durability.MACHINE if config.fsync else Durability.PROCESS,
                deletes=True,
                clears=True,
                evicts=config.capacity is not None,
                # What a read does while nobody knows yet where the path leads: it is guarded, and waited for.
                hung_reads=HungReads.WAIT if config.hung_reads == "wait" else HungReads.BOUNCE_BUFFER,
            ),
            verifies_checksums=config.verify_checksums,
            metrics=config.metrics,
        )
        self._config = config
        self._store: Store | None = None
        self._refused: set[str] = set()
        """Pools whose pages do not fit into the capacity."""

    @property
    def store(self) -> Store:
        """The open store.

        Raises:
            StorageUnavailableError: it is not open.
        """
        if self._store is None:
            raise StorageUnavailableError("file: the store is not open")
        return self._store

    def admit_pool(self, pool: RegisteredPool) -> None:
        limit, size = self._config.capacity_bytes, pool.namespace.object_bytes
        if limit is None or size <= limit:
            self._refused.discard(pool.name)
            return
        self._refused.add(pool.name)
        logger.error("pages of pool %s have %d bytes, the capacity is %d: none will be stored", pool.name, size, limit)

    def connect(self) -> None:
        self._store = Store(self._config, self._count_evicted, self._count_damaged)
        # Known only now: a path says nothing about where it leads.
        self._capabilities = replace(
            self._capabilities,
            may_hang=self._store.may_hang,
            hung_reads=HungReads.BOUNCE_BUFFER if self._store.buffers is not None else HungReads.WAIT,
        )

    def disconnect(self) -> None:
        store, self._store = self.store, None
        store.close()

    def check_health(self) -> Health:
        self.store.board.read()
        if self._refused:
            return Health(ok=False, detail=f"pages of pool {', '.join(sorted(self._refused))} are larger than the capacity")
        ignored, stuck = self.store.ignored(), self.store.hung_reads()
        found = [f"{ignored} damaged bundles ignored"] * bool(ignored) + [f"{stuck} reads hang"] * bool(stuck)
        return Health(ok=True, detail="; ".join(found))

    def objects_exist_cached(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]] | None:
        store = self.store
        catalogs = store.cached_catalogs([batch.namespace for batch in batches])
        if catalogs is None:
            return None
        if store.capacity is not None:
            for catalog, batch in zip(catalogs, batches, strict=True):
                catalog.touch([*call.prefix_keys, *batch.keys])
        return [catalog.contains(batch.keys) for catalog, batch in zip(catalogs, batches, strict=True)]

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        store = self.store
        catalogs = store.catalogs([batch.namespace for batch in batches], call.expired)
        if store.capacity is not None:
            for catalog, batch in zip(catalogs, batches, strict=True):
                catalog.touch([*call.prefix_keys, *batch.keys])
        store.after_call()
        return [catalog.contains(batch.keys) for catalog, batch in zip(catalogs, batches, strict=True)]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        store = self.store
        namespaces = [batch.namespace for batch in batches]
        catalogs = store.catalogs(namespaces, call.expired)
        if store.capacity is not None:
            for catalog, batch in zip(catalogs, batches, strict=True):
                catalog.touch([*call.prefix_keys, *[read.key for read in batch.reads]])
        outcome = store.reader.read(_runs(catalogs, [batch.reads for batch in batches]), call)
        arrived, faults = set(outcome.arrived), outcome.faults
        for _ in range(ATTEMPTS):
            if not outcome.gone:
                break
            # Rewritten by someone else just now, or evicted; after catching up it is known where they are, if anywhere.
            store.distrust([run.bundle for run in outcome.gone])
            catalogs = store.catalogs(namespaces, call.expired)
            again = {read for run in outcome.gone for read in run.reads}
            outcome = store.reader.read(
                _runs(catalogs, [[read for read in batch.reads if read in again] for batch in batches]), call
            )
            arrived.update(outcome.arrived)
            faults += outcome.faults
        if arrived:
            for catalog in catalogs:
                catalog.note_service()
        store.after_call()
        self.note_partial_faults(faults, served=bool(arrived))
        return [[read in arrived for read in batch.reads] for batch in batches]

    def read_objects_cached(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        store = self.store
        catalogs = store.cached_catalogs([batch.namespace for batch in batches])
        if catalogs is None:
            return False
        runs = _runs(catalogs, [batch.reads for batch in batches])
        if sum([len(run.reads) for run in runs]) < sum([len(batch.reads) for batch in batches]):
            return False
        if not store.reader.read_cached(runs, call):
            return False
        for catalog, batch in zip(catalogs, batches, strict=True):
            catalog.note_service()
            if store.capacity is not None:
                catalog.touch([*call.prefix_keys, *[read.key for read in batch.reads]])
        store.after_call(may_wait=False)
        return True

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        store = self.store
        # The SDK has just looked up the pages; a copy that someone has published since does no harm.
        catalogs = store.known_catalogs([batch.namespace for batch in batches])
        drafts = self._planned(batches, catalogs, call)
        store.workers.run([partial(store.writer.write, draft, call) for draft in drafts])
        published = store.changes.publish(drafts, call)
        stored = {write for draft, _ in published for write in draft.writes}
        if store.capacity is not None:
            for catalog in catalogs:
                catalog.touch_bundles([bundle for draft, bundle in published if draft.catalog is catalog])
                # A head that is older than its tail would be evicted before it.
                catalog.touch(call.prefix_keys)
        for catalog in catalogs:
            self._retire_damaged(catalog, [write for write in stored if write.replaces])
        store.after_call()
        self.note_partial_faults([draft.fault for draft in drafts if draft.fault], served=bool(stored))
        return [[write in stored for write in batch.writes] for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        store = self.store
        catalogs = store.catalogs([batch.namespace for batch in batches], call.expired)
        if not all(catalog.complete for catalog in catalogs):
            raise OSError(errno.ETIMEDOUT, "the deadline has passed, and the pages may be in bundles not looked into yet")
        found = [catalog.contains(batch.keys) for catalog, batch in zip(catalogs, batches, strict=True)]
        for catalog, batch in zip(catalogs, batches, strict=True):
            if call.expired():
                raise TimeoutError("the deadline of the delete has passed")
            store.rewriter.drop_all(catalog, partial(_places, catalog, batch.keys))
            catalog.shelf.share_knowledge()
        store.changes.announce(insist=not all(map(all, found)))
        return found

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        store = self.store
        for _ in range(CLEARING_ATTEMPTS):
            for namespace in namespaces:
                store.shelves.get(namespace.name).distrust()
            # Whole bundles go: nobody needs to know what is in them.
            if self._clear_listed(store.catalogs(namespaces, expired=lambda: True), call):
                return
        raise FileNotFoundError("others keep on rewriting the bundles that are to be cleared")

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        store, certain = self.store, True
        for catalog, batch in zip(store.catalogs([batch.namespace for batch in batches], call.expired), batches, strict=True):
            certain &= catalog.complete
            inspection = Inspection(catalog, store.reader, store.descriptors, call, verifies=self._config.verify_checksums)
            store.rewriter.drop_all(catalog, partial(inspection.damaged, dict.fromkeys(read.key for read in batch.reads)))
            certain &= inspection.certain
        # Where some copy may still be damaged, the SDK hides the page until the next set has written it anew.
        return certain

    def _clear_listed(self, catalogs: Sequence[Catalog], call: Call) -> bool:
        """Remove all bundles that are known; `False` where another may have taken one's place meanwhile.

        Raises:
            OSError: some are still there; `TimeoutError` where the caller waits no longer.
        """
        fault: OSError | None = None
        removed = True
        for catalog in catalogs:
            for bundle in list(catalog.shelf.bundles.values()):
                if call.expired():
                    # The caller has been told that the clear did not end, and may have begun to store pages anew.
                    fault = TimeoutError("the deadline of the clear has passed; some bundles are still there")
                    break
                try:
                    removed &= self.store.changes.remove(catalog.shelf, bundle)
                except IsADirectoryError:
                    # Not a file of this driver, whatever its name: no page is in it.
                    continue
                except OSError as error:
                    fault = kept(error)
            catalog.shelf.share_knowledge()
        self.store.changes.announce(insist=True)
        if fault is not None:
            raise fault
        return removed

    def _planned(self, batches: Sequence[WriteBatch], catalogs: Sequence[Catalog], call: Call) -> list[Draft]:
        """The bundles to be written, with room made for them."""
        store, drafts = self.store, list[Draft]()
        limit = None if store.capacity is None else store.capacity.limit
        for batch, catalog in zip(batches, catalogs, strict=True):
            planned = store.writer.plan(catalog, batch.writes, limit)
            drafts += planned
            if limit is not None:
                limit -= sum(draft.name.size for draft in planned)
        if store.capacity is None:
            return drafts
        for catalog in catalogs:
            catalog.touch(call.prefix_keys)
        for draft in drafts:
            store.writer.open(draft)
        try:
            excess = store.capacity.make_room(call.expired)
        except BaseException:
            # Whatever it is: their room is taken, and their files are open.
            for draft in drafts:
                store.writer.discard(draft)
            raise
        while excess > 0 and drafts:
            draft = drafts.pop()
            store.writer.discard(draft)
            excess -= draft.name.size
        return drafts

    def _retire_damaged(self, catalog: Catalog, writes: Sequence[ObjectWrite]) -> None:
        """Drop the damaged copies of pages that have just been written anew."""
        envelopes = {write.key: write.envelope for write in writes if write.namespace.name == catalog.namespace.name}
        if not envelopes:
            return
        try:
            self.store.rewriter.drop_all(catalog, partial(_other_places, catalog, envelopes))
        except OSError as error:
            # The new copy is the newer one, and read in their stead.
            logger.debug("cannot drop damaged copies: %s", error)

    def _count_evicted(self, namespace: Namespace, pages: int) -> None:
        self.recorder.count(namespace.pool, pages_evicted=pages)

    def _count_damaged(self, namespace: Namespace, pages: int) -> None:
        self.recorder.count(namespace.pool, pages_damaged=pages)
        logger.warning("%d more damaged pages in pool %s; they are misses until they are set again", pages, namespace.pool)


def _runs(catalogs: Sequence[Catalog], reads: Sequence[Sequence[ObjectRead]]) -> list[Run]:
    return [run for catalog, some in zip(catalogs, reads, strict=True) for run in catalog.locate(some)]


def _places(catalog: Catalog, keys: Sequence[str]) -> list[Location]:
    return [place for key in keys for place in catalog.copies(key)]


def _other_places(catalog: Catalog, envelopes: Mapping[str, bytes]) -> list[Location]:
    """Copies of pages that are not the ones with these envelopes."""
    return [
        (bundle, page)
        for key, envelope in envelopes.items()
        for bundle, page in catalog.copies(key)
        if bundle.envelope(page) != envelope
    ]
