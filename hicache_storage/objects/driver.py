"""Methods that a driver implements for `ObjectStorage`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from hicache_storage.spec import DriverContractError, Health, HiCacheStorage, is_refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects.batches import Call, LookupBatch, ReadBatch, WriteBatch
    from hicache_storage.objects.namespace import Namespace
    from hicache_storage.objects.recorder import StatsRecorder
    from hicache_storage.objects.removals import ObjectRemoval
    from hicache_storage.objects.requests import RegisteredPool

logger = logging.getLogger(__name__)


class ObjectDriver(HiCacheStorage):
    """A store of objects: they are looked up, read into buffers and written from buffers.

    The methods may be called from several threads at once. They raise the errors of their store
    (`StorageUnavailableError`, `OSError`, ...): the call is then a miss for all its pages.
    """

    driver_name: str
    """Name in messages and statistics."""
    recorder: StatsRecorder
    """Counters of this storage."""

    writes_find_existing: ClassVar[bool] = False
    """`write_objects` skips existing objects, and sets `ObjectWrite.existed`.

    The SDK does not look them up before.
    """

    caches_lookups: bool = False
    """`objects_exist_cached` is implemented; `connect` may set it for a store that it suits."""

    caches_reads: bool = False
    """`read_objects_cached` is implemented; `connect` may set it for a store that it suits."""

    @abstractmethod
    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        """Look objects up: for each batch, for each key, `True` if the object exists.

        One round trip for all of them.
        """

    def objects_exist_cached(
        self, batches: Sequence[LookupBatch], call: Call
    ) -> list[list[bool]] | None:
        """Answer `objects_exist` without I/O, and without a lock that is held during I/O.

        None where that is not possible.

        Only with `caches_lookups`. A call answered so needs no thread for its deadline.
        """
        return None

    @abstractmethod
    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        """Read objects: fill the parts of each read.

        Answers `True` if all of them were filled from one object.

        An object of another length than the parts is not delivered: set `read.damaged` and answer
        `False`.
        """

    def read_objects_cached(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        """Fill all reads without waiting for I/O or for a lock that is held during I/O.

        Only with `caches_reads`. A call answered so needs no thread for its deadline.

        Returns:
            True if every read was filled and verified; otherwise `read_objects` is called for all
            of them.
        """
        return False

    @abstractmethod
    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        """Write objects: store the parts of each write as one object; `True` if it is visible.

        It is visible whole or not at all.

        The SDK has left out pages that exist, unless `writes_find_existing`. Publish nothing once
        `call.expired()`.
        """

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        """Remove objects; `True` where one was removed. Only with the capability `deletes`."""
        raise DriverContractError(
            f"{type(self).__name__} declares 'deletes' without delete_objects()"
        )

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        """Remove all objects of these namespaces, and return when none is left.

        Only with the capability `clears`.

        Raise if the objects were not removed, or if that is unknown: callers rely on a clear that
        returns (rule LC-7). Check `call.expired()` between steps, and raise once it is true: the
        caller has been answered, and objects that are stored afterwards must not be removed.
        """
        raise DriverContractError(
            f"{type(self).__name__} declares 'clears' without clear_namespaces()"
        )

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        """Remove damaged objects that were just read, for all storages, if the driver can.

        Only with a removal that is conditional, in one step of the store, on the object being the
        one that was read (`ObjectRead.has_read`): another storage may have repaired it meanwhile,
        and its set has answered `True`.

        Returns:
            True if none of the damaged objects exists any more. Otherwise the SDK hides them from
            its own lookups, and the next set replaces them. A set of another storage, which does
            not know of the damage, takes them as existing (rule SET-3).
        """
        return False

    def collect_removals(
        self, namespaces: Sequence[Namespace], call: Call
    ) -> tuple[list[ObjectRemoval], bool]:
        """Return the objects that were removed since the last call. Only with `removals`.

        Those that `discard_objects` has removed included, and none that was only moved. The first
        call that names a namespace begins its watch, and has no objects of it. One call at a time.
        It ends as `objects_exist` does, where `lookup_seconds` is declared. After an error the next
        call returns what this one would have.

        Returns:
            The objects, in the order of their removals as far as it is known; and True if some may
            be missing.
        """
        raise DriverContractError(
            f"{type(self).__name__} declares 'removals' without collect_removals()"
        )

    def recall_removals(self, batches: Sequence[LookupBatch], call: Call) -> list[ObjectRemoval]:
        """Return what the store remembers of removals of these objects, the oldest first.

        For `hicache why`. A store that remembers nothing need not implement it.
        """
        return []

    def described_namespaces(self) -> list[Namespace] | None:
        """Return the namespaces that the store has descriptions of; None if it keeps none.

        For `hicache why`, which asks for a page under other identities than the storage's own.
        """
        return None

    def remove_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> bool:
        """Remove the remains of namespaces without objects, such as their files.

        Returns:
            True if nothing of them remains. A driver whose namespaces leave nothing in a store need
            not implement it.
        """
        return True

    def admit_pool(self, pool: RegisteredPool) -> None:
        """Check a pool before it is registered, in place of a former one of its name.

        Raises:
            InvalidPoolError: this driver cannot serve the pool; the former one stays.
        """

    def connect(self) -> None:
        """Connect to the store; called once before the first batch, never at construction."""

    def disconnect(self) -> None:
        """Undo `connect`; called once, when no batch is in flight any more."""

    def check_health(self) -> Health:
        """Check that the store answers, and tell what is known to keep sets out; may raise.

        The reason of the last refused set is added.
        """
        return Health(ok=True)

    def note_partial_faults(self, faults: Sequence[Exception], *, served: bool) -> None:
        """Report faults of some pages of a batch, which the driver answers as missed or not stored.

        If other pages were served, one fault is counted, and the call has not failed for a circuit
        breaker; otherwise the first is raised, for the SDK to count and log. A refusal
        (`is_refusal`) is no fault.

        Raises:
            Exception: the first of the faults, where no page was served.
        """
        if not faults:
            return
        real = [fault for fault in faults if not is_refusal(fault, reads=True)]
        first = (real or faults)[0]
        if not served:
            raise first
        if real:
            self.recorder.count_fault(partial=True)
        logger.debug("%s: answering misses for a part of a call: %s", self.driver_name, first)
