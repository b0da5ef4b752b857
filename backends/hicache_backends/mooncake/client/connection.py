"""A connected client of the library: requests with typed errors, registrations, sessions."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.client.client_setup import (
    PROBE_SECONDS,
    check_master,
    set_up,
    warm_up,
)
from hicache_backends.mooncake.client.in_flight import InFlight
from hicache_backends.mooncake.stores import Stores
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_backends.mooncake.client.library import Store
    from hicache_backends.mooncake.config import ClientSettings

MAX_NAMES: Final = 50_000
"""Names in one request. The master takes about 3 us for each."""
PROBE_BYTES: Final = 64
"""Of an object that is read to find out whether its store answers; none is smaller."""
SEEN_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0
SETS: Final = "sets"
"""In place of an endpoint: the master chooses the stores of objects that are written."""
REPEAT_SECONDS: Final = 0.5
"""Failed transfers are repeated within this time."""
STALE_SECONDS: Final = 12.0
"""Longer than the master lists a store that has been killed (10 s by default)."""
MAX_STALE_SECONDS: Final = 600.0
PAUSE_SECONDS: Final = 10.0
"""Transfers that have not failed for so long do not fail any more."""


class Connection:
    """A client that several storages of a process share. Safe for many threads.

    `close` does not wait: the last call in flight closes the client.

    Args:
        settings: of the client.
        stale_seconds: see `is_stale`.
        stores: health of the stores, from a connection that this one replaces.

    Raises:
        DriverUnavailableError: the library is missing or too old.
        StorageUnavailableError: the master cannot be reached, or refuses.
    """

    def __init__(
        self,
        settings: ClientSettings,
        stale_seconds: float = STALE_SECONDS,
        stores: Stores | None = None,
    ) -> None:
        self.settings = settings
        self.stale_seconds = stale_seconds
        if settings.master is not None:
            # The set-up holds the GIL, so a master that hangs must be found before it.
            check_master(settings.master, min(PROBE_SECONDS, settings.rpc_timeout_seconds))
        self._store = set_up(settings)
        self._lock = threading.Lock()
        # The lock guards these two, and changes of `_unrevoked`. `_suspect` and the times of failed
        # transfers are set without it: a race costs or saves a probe, or delays a replacement.
        self._calls = 0
        self._closing = False
        self._suspect = False
        self._opened = time.monotonic()
        self._failing_since = self._opened
        self._failed_last = self._opened
        self._memory = threading.Lock()
        """Guards the registrations. A lock of its own, because pinning a large pool takes long."""
        self._registered: dict[tuple[int, int], int] = {}
        self._revoking = threading.Lock()
        self._keeping = threading.Lock()
        self._kept = Counter[str]()
        """Uses of the lookups of each name."""
        self.stores = stores or Stores()
        self._seen: dict[str, float] = {}
        """Stores of objects that were read, and when that was."""
        self._look_at = 0.0
        """When the master is asked even if all objects are on one store."""
        self._unrevoked = set[str]()
        """Names of begun writes that could neither be published nor revoked."""
        # Last, because the requests of the warm-up use everything above.
        warm_up(self.exist)

    def close(self) -> None:
        """Disconnect, as soon as no call is in flight."""
        with self._lock:
            self._closing = True
            idle = not self._calls
        # Never under a call, which would use a client that is gone: otherwise `_leave` closes it.
        if idle:
            self._store.close()

    @property
    def is_stale(self) -> bool:
        """Return whether transfers have kept failing for more than `stale_seconds`.

        Over TCP a client remembers the port of each store by the store's name, until it is closed.
        A store that was restarted under its old name has another port. Never true where ports are
        in the names, nor of a client that lends memory, because the pages in it would leave with
        it.
        """
        settings = self.settings
        if self._failed_last - self._failing_since <= self.stale_seconds:
            return False
        replaceable = (
            settings.protocol == "tcp"
            and settings.metadata_server != "P2PHANDSHAKE"
            and not settings.global_segment_size
        )
        return replaceable and time.monotonic() - self._failed_last < PAUSE_SECONDS

    @property
    def next_stale_seconds(self) -> float:
        """`stale_seconds` for a connection that replaces this one.

        Doubled where transfers have failed from the beginning: where a store cannot be reached,
        another client does not help.
        """
        if self._failing_since - self._opened > PAUSE_SECONDS:
            return STALE_SECONDS
        return min(2 * self.stale_seconds, MAX_STALE_SECONDS)

    @property
    def has_failed_lately(self) -> bool:
        """Return whether transfers hang, or have failed within `PAUSE_SECONDS`."""
        if self.stores.any_out(PAUSE_SECONDS):
            return True
        return self._opened < self._failed_last > time.monotonic() - PAUSE_SECONDS

    def note_failure(self, began: float | None = None) -> None:
        """Note that transfers of a request have failed, or hang.

        Args:
            began: when the request began (`time.monotonic()`).
        """
        now = time.monotonic()
        began = now if began is None else began
        if began - self._failed_last > PAUSE_SECONDS:
            self._failing_since = began
        self._failed_last = now

    # Memory.

    def register(self, start: int, size: int) -> bool:
        """Register memory with the transports. False if they refuse; over TCP that does no harm.

        Registrations of equal regions are counted: the last `unregister` removes the memory.
        """
        with self._memory:
            count = self._registered.get((start, size), 0)
            if not count and self._store.register_buffer(start, size):
                return False
            self._registered[start, size] = count + 1
            return True

    def unregister(self, start: int, size: int) -> None:
        """Undo one `register`."""
        with self._memory:
            count = self._registered.pop((start, size), 0)
            if count > 1:
                self._registered[start, size] = count - 1
            elif count:
                self._store.unregister_buffer(start)

    # Requests. Results are in the order of the names.

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Check which complete objects exist, with one request for each `MAX_NAMES` names.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        if len(names) <= MAX_NAMES:
            return self._exist(names)
        return [
            there
            for start in range(0, len(names), MAX_NAMES)
            for there in self._exist(names[start : start + MAX_NAMES])
        ]

    def _exist(self, names: Sequence[str]) -> list[bool]:
        codes = self._answered(lambda store: store.batch_is_exist(names), len(names))
        there = codes.count(1)
        if there == len(codes):
            return [True] * there
        strange = [code for code in codes if code < 0 and code not in library.GONE]
        if strange:
            raise StorageUnavailableError(
                f"the master answered {strange[0]} to the question whether an object is there"
            )
        return [code == 1 for code in codes]

    def read(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read each object to its addresses. Returns lengths or codes. Names must be distinct.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        return self._answered(
            lambda store: store.batch_get_into_multi_buffers(names, addresses, sizes), len(names)
        )

    @contextlib.contextmanager
    def looked_up(self, names: Sequence[str]) -> Generator[list[int]]:
        """Look up objects for `read_ranges` calls within the context. Yields 0 or a code for each.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        with self.kept(names):
            yield self._answered(lambda store: store.batch_get_session_start(names), len(names))

    @contextlib.contextmanager
    def kept(self, names: Sequence[str]) -> Generator[None]:
        """Keep lookups for a request that may outlast the call's `looked_up`.

        The library holds one lookup of a name at a time, for all calls: the last one ends it.
        """
        with self._keeping:
            self._kept.update(names)
        try:
            yield
        finally:
            with self._keeping:
                self._kept.subtract(names)
                ended = [name for name in names if self._kept[name] <= 0]
                for name in ended:
                    del self._kept[name]
                if ended:
                    self._store.batch_get_session_end(ended)

    def places(self, names: Sequence[str]) -> dict[str, str]:
        """Return the endpoints of the stores that `read_ranges` asks for looked up objects.

        Objects that have gone meanwhile are left out. Where all objects were on one store lately,
        the master is not asked.

        Raises:
            StorageUnavailableError: the connection is closed.
        """
        now = time.monotonic()
        lately = [store for store, at in self._seen.items() if now - at < SEEN_SECONDS]
        if len(lately) == 1 and now < self._look_at and not self.stores.any_out():
            return dict.fromkeys(names, lately[0])
        places = {name: copies[0] for name, copies in self.copies(names).items() if copies}
        self._look_at = now + LOOK_SECONDS
        self._seen = {store: self._seen[store] for store in lately} | dict.fromkeys(
            places.values(), now
        )
        return places

    def copies(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the endpoints of the stores with copies of existing objects, in their order.

        Raises:
            StorageUnavailableError: the connection is closed.
        """
        if not names:
            return {}
        with self._call() as store:
            found = store.batch_get_replica_desc(names)
        return {
            name: [
                copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
                for copy in copies
                if copy.is_memory_replica()
            ]
            for name, copies in found.items()
        }

    def can_read(self, name: str) -> bool:
        """Return whether the beginning of an object can be read.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        memory = (ctypes.c_char * PROBE_BYTES)()
        with self.looked_up([name]) as codes:
            return not codes[0] and self.read_ranges(
                [name], [[ctypes.addressof(memory)]], [[PROBE_BYTES]]
            ) == [PROBE_BYTES]

    def read_ranges(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read the first bytes of looked up objects to their addresses. Returns lengths or codes.

        No byte arrives after the return. Transfers run one after the other. A transfer without
        progress is given up after `library.TRANSFER_TIMEOUTS`, and the next one begins. Where some
        have failed at once, these are repeated once: their TCP connection may have ended.
        """
        asked = list(zip(names, addresses, sizes, strict=True))
        began = time.monotonic()
        codes = self._read_ranges(asked)
        failed = [at for at, code in enumerate(codes) if code == library.TRANSFER_FAILED]
        # The first one alone: each takes a second if the store is gone.
        for some in (failed[:1], failed[1:]):
            if not some or time.monotonic() - began > REPEAT_SECONDS:
                break
            for at, code in zip(some, self._read_ranges([asked[at] for at in some]), strict=True):
                codes[at] = code
        if library.TRANSFER_FAILED in codes:
            self.note_failure(began)
        return codes

    def _read_ranges(self, asked: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[int]:
        names, addresses, sizes = zip(*asked, strict=True)
        offsets = [list(accumulate(some[:-1], initial=0)) for some in sizes]
        with self._call() as store:
            codes = store.batch_get_into_multi_buffer_ranges(names, addresses, sizes, offsets)
        return _checked_length(codes, len(asked))

    def size(self, name: str) -> int:
        """Request the length of an object. Returns a code if it fails."""
        with self._call() as store:
            return store.get_size(name)

    def begin(self, names: Sequence[str], sizes: Sequence[int], config: object) -> list[int]:
        """Begin writing objects that do not exist. Returns 0 or a code for each.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        return self._answered(
            lambda store: store.batch_put_session_start(names, sizes, config), len(names)
        )

    def transfer(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[bool]:
        """Write the bytes of begun objects. False for each object whose transfer has failed."""
        began, failed = time.monotonic(), True
        token = self.stores.begin(SETS, sum(map(sum, sizes)))
        try:
            with self._call() as store:
                codes = store.batch_put_from_multi_buffer_ranges(names, addresses, sizes, offsets)
            failed = library.TRANSFER_FAILED in codes
        finally:
            self.stores.end(SETS, token, failed=failed)
        if failed:
            self.note_failure(began)
        return [code >= 0 for code in _checked_length(codes, len(names))]

    def publish(self, names: Sequence[str]) -> list[bool]:
        """Make written objects visible. Revokes the others, and returns False for them."""
        try:
            codes = self._asked(lambda store: store.batch_put_session_end(names), len(names))
        except StorageUnavailableError:
            # Only the response may be lost: `revoke_pending` finds out whether they are visible.
            self._revoke_later(names)
            raise
        failed = [name for name, code in zip(names, codes, strict=True) if code]
        if failed:
            self.revoke(failed)
        return [not code for code in codes]

    def revoke(self, names: Sequence[str]) -> None:
        """Revoke begun objects; if the master does not answer, before the next `begin`."""
        try:
            codes = self._asked(lambda store: store.batch_put_session_revoke(names), len(names))
        except StorageUnavailableError:
            self._revoke_later(names)
        else:
            self._revoke_later(
                [
                    name
                    for name, code in zip(names, codes, strict=True)
                    if code not in library.NOT_BEGUN
                ]
            )

    def revoke_pending(self) -> None:
        """Revoke the objects of earlier calls that could not be revoked then.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        if not self._unrevoked:
            return
        # One thread at a time: a second one would revoke names that were begun again meanwhile.
        with self._revoking, self._call() as store:
            with self._lock:
                names = sorted(self._unrevoked)
            codes = (
                _checked_length(store.batch_put_session_revoke(names), len(names)) if names else []
            )
            complete = [
                name
                for name, code in zip(names, codes, strict=True)
                if code == library.INVALID_WRITE
            ]
            if complete:
                # The object is visible, only the response was lost: a second end closes the
                # session.
                store.batch_put_session_end(complete)
            given_up = [
                name for name, code in zip(names, codes, strict=True) if code in library.NOT_BEGUN
            ]
            with self._lock:
                self._unrevoked.difference_update(given_up, complete)

    def _revoke_later(self, names: Sequence[str]) -> None:
        with self._lock:
            self._unrevoked.update(names)

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects, also leased ones. False for each object that did not exist.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        return [
            gone
            for start in range(0, len(names), MAX_NAMES)
            for gone in self._remove(names[start : start + MAX_NAMES])
        ]

    def _remove(self, names: Sequence[str]) -> list[bool]:
        codes = self._answered(lambda store: store.batch_remove(names, True), len(names))
        strange = [code for code in codes if code and code not in library.GONE]
        if strange:
            raise StorageUnavailableError(
                f"the master answered {strange[0]} to a request to remove an object"
            )
        return [not code for code in codes]

    @contextlib.contextmanager
    def claimed(self, names: Sequence[str]) -> Generator[set[str]]:
        """Claim objects for a removal; yields those that no other client has claimed.

        The library removes by name alone, so that what others store between a look and the removal
        would go. They store nothing while the object is there, and remove it only under a claim:
        an object beside it, which is begun and never published.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        claims = {f"{name}-claim": name for name in names}
        self.revoke_pending()
        codes = self.begin(list(claims), [1] * len(claims), library.replicate_config(1))
        begun = [claim for claim, code in zip(claims, codes, strict=True) if not code]
        try:
            yield {claims[claim] for claim in begun}
        finally:
            if begun:
                self.revoke(begun)

    def remove_lost(self, names: Sequence[str]) -> set[str]:
        """Remove objects of which all copies lie on stores that are left out.

        Returns their names; objects that another client has claimed are still there.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        lost = self._lost(names)
        if lost:
            with self.claimed(lost) as claimed:
                # Others may have stored them anew meanwhile.
                self.remove(self._lost(sorted(claimed)))
        return set(lost)

    def _lost(self, names: Sequence[str]) -> list[str]:
        return [
            name
            for name, copies in self.copies(names).items()
            if copies and all(map(self.stores.is_out, copies))
        ]

    def remove_prefix(self, prefix: str) -> None:
        """Remove all objects with a prefix, which must have no special character of a pattern.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        with self._call() as store:
            code = store.remove_by_regex(f"^{prefix}.*", True)
            # A dead connection, as in `_asked`. A request that has timed out is not repeated: the
            # master may still be at work on the first one.
            if code == library.RPC_FAILED and self._master_responds():
                code = store.remove_by_regex(f"^{prefix}.*", True)
        if code == library.RPC_TIMED_OUT:
            raise StorageTimeoutError(
                "the master has not answered in time whether it has removed objects"
            )
        if code < 0:
            raise StorageUnavailableError(
                f"the master answered {code} to a request to remove objects"
            )

    def _call(self) -> InFlight[Store]:
        return InFlight(self._begin, self._leave)

    def _begin(self) -> Store:
        with self._lock:
            if self._closing:
                raise StorageUnavailableError("the connection is closed")
            # Counted before the probe, which takes up to `PROBE_SECONDS`: `close` must see this
            # call.
            self._calls += 1
            suspect = self._suspect
        if suspect and self.settings.master is not None:
            try:
                # Fails faster than the library's own attempts to reconnect.
                check_master(
                    self.settings.master, min(PROBE_SECONDS, self.settings.rpc_timeout_seconds)
                )
            except BaseException:
                self._leave()
                raise
            self._suspect = False
        return self._store

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            last = self._closing and not self._calls
        if last:
            self._store.close()

    def _asked(self, request: Callable[[Store], list[int]], count: int) -> list[int]:
        """Send a request, and once more after a dead connection if the master answers a probe."""
        with self._call() as store:
            codes = _checked_length(request(store), count)
            if not _any_failed(codes):
                self._suspect = False
                return codes
            # A request that was served in part is not repeated: some of its objects have changed.
            if codes.count(library.RPC_FAILED) == count and self._master_responds():
                codes = _checked_length(request(store), count)
        self._suspect = any(code in library.UNREACHABLE for code in codes)
        return codes

    def _answered(self, request: Callable[[Store], list[int]], count: int) -> list[int]:
        """Send a request, and check that the master has answered.

        Raises:
            StorageUnavailableError: no response for any object, or a response of wrong length.
        """
        codes = self._asked(request, count)
        if (
            codes
            and codes[0] in library.UNREACHABLE
            and all(code in library.UNREACHABLE for code in codes)
        ):
            if codes[0] == library.RPC_TIMED_OUT:
                raise StorageTimeoutError("the master has not answered in time")
            raise StorageUnavailableError("the master cannot be reached")
        return codes

    def _master_responds(self) -> bool:
        if self.settings.master is None:
            return True
        try:
            check_master(
                self.settings.master, min(PROBE_SECONDS, self.settings.rpc_timeout_seconds)
            )
        except StorageUnavailableError:
            return False
        return True


def _any_failed(codes: Sequence[int]) -> bool:
    """True if any code is an error. Faster than a loop: most requests have none."""
    return min(codes, default=0) < 0


def _checked_length(codes: list[int], count: int) -> list[int]:
    if len(codes) != count:
        raise StorageUnavailableError(
            f"the library answered for {len(codes)} objects and was asked for {count}"
        )
    return codes
