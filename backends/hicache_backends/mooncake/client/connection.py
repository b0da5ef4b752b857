"""A connected client of the library: requests with typed errors, registrations, sessions."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
import struct
import threading
import time
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.stores import Stores
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Sequence

    from hicache_backends.mooncake.client.library import Store
    from hicache_backends.mooncake.config import ClientSettings

MAX_NAMES: Final = 50_000
"""Names in one request. The master takes about 3 us for each, and a request has a time limit."""
PROBE_BYTES: Final = 64
"""Of an object that is read to find out whether its store answers; none is smaller."""
SEEN_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0
REPEAT_SECONDS: Final = 0.5
"""Failed transfers are repeated within this time."""
PAUSE_SECONDS: Final = 10.0
"""Transfers that have not failed for so long do not fail any more."""
PROBE_SECONDS: Final = 2.0
"""Timeout of a probe of the master."""
CONNECT_ATTEMPTS: Final = 4
CONNECT_PAUSE: Final = 1.0
"""Seconds after each of the library's attempts to reconnect to the master."""
_UNKNOWN_FUNCTION: Final = 0x48694361
# coro_rpc: magic, version, serialisation, message type, sequence, function, body and attachment
# length, little endian.
_REQUEST: Final = struct.pack("<BBBBIIII", 21, 1, 0, 0, 0, _UNKNOWN_FUNCTION, 0, 0)


def check_master(settings: ClientSettings) -> None:
    """Call a function that no master has. A refusal or a closed connection proves a live master.

    Of masters that take over from each other the address is not known, and nothing is called.

    The library is not used: it holds the GIL while it connects, so a master that accepts
    connections and does not answer would stop the whole process.

    Raises:
        StorageTimeoutError: no answer in time.
        StorageUnavailableError: the connection is refused, or fails otherwise.
    """
    address = settings.master
    if address is None:
        return
    where = f"the master at {address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=PROBE_SECONDS) as connection:
            connection.sendall(_REQUEST)
            connection.recv(1)
    except TimeoutError as error:
        raise StorageTimeoutError(f"{where} has not answered for {PROBE_SECONDS:.1f} s") from error
    except ConnectionResetError:
        return
    except OSError as error:
        raise StorageUnavailableError(f"{where} cannot be reached: {error}") from error


def set_up(settings: ClientSettings) -> Store:
    """Set up a client. The caller has probed the master, because this call holds the GIL.

    Raises:
        DriverUnavailableError: the library is missing or too old.
        StorageUnavailableError: the library refuses.
    """
    library.set_transfer_timeouts()
    variables = {
        **library.TIME_LIMITS,
        # The master has answered the probe, and each further attempt would hold the GIL.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        **({} if settings.metadata_server == "P2PHANDSHAKE" else library.REFRESH),
    }
    with library.environment(variables):
        store = library.new_store()
        code = store.setup(
            settings.local_hostname,
            settings.metadata_server,
            settings.global_segment_size,
            settings.local_buffer_size,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
            tenant_id=settings.tenant_id,
        )
    if code:
        store.close()
        raise StorageUnavailableError(
            f"Mooncake's client cannot be set up (code {code}) with the master "
            f"{settings.master_server_address!r}, metadata_server "
            f"{settings.metadata_server!r}, local_hostname {settings.local_hostname!r} and "
            f"protocol {settings.protocol!r}"
        )
    return store


def max_lookup_seconds(settings: ClientSettings) -> float | None:
    """Upper bound of one lookup in seconds; None if the settings imply none.

    After a dead connection a request is sent twice, each time after a probe.
    """
    limits = [os.environ.get(name, limit) for name, limit in library.TIME_LIMITS.items()]
    if settings.master is None or not all(limit.isdecimal() for limit in limits):
        return None
    request, connect = (int(limit) / 1000 for limit in limits)
    return CONNECT_ATTEMPTS * (connect + CONNECT_PAUSE) + 2 * request + 2 * PROBE_SECONDS


class Connection:
    """A client that several storages of a process share. Safe for many threads.

    Handles count the calls in flight. A closed client must not be used.

    Raises:
        DriverUnavailableError: the library is missing or too old.
        StorageUnavailableError: the master cannot be reached, or refuses.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.users = 0
        """Storages that use it, counted by the cache of connections."""
        # The set-up holds the GIL, so a master that hangs must be found before it.
        check_master(settings)
        self._store = set_up(settings)
        self._lock = threading.Lock()
        """Guards changes of `_unrevoked`."""
        # Set without a lock: a race costs or saves a probe.
        self._suspect = False
        self._sets_failed = -math.inf
        self._memory = threading.Lock()
        """Guards the registrations. A lock of its own, because pinning a large pool takes long."""
        self._registered: dict[tuple[int, int], int] = {}
        self._revoking = threading.Lock()
        self._keeping = threading.Lock()
        self._kept = Counter[str]()
        """Uses of the lookups of each name."""
        self.stores = Stores()
        self._seen: dict[str, float] = {}
        """Stores of objects that were read, and when that was."""
        self._look_at = 0.0
        """When the master is asked even if all objects are on one store."""
        self._unrevoked = set[str]()
        """Names of begun writes that could neither be published nor revoked."""

    def close(self) -> None:
        """Disconnect. No call may be in flight."""
        self._store.close()

    @property
    def has_failed_lately(self) -> bool:
        """Return whether transfers hang, or have failed within `PAUSE_SECONDS`."""
        sets = time.monotonic() - self._sets_failed < PAUSE_SECONDS
        return sets or self.stores.any_out(PAUSE_SECONDS)

    def note_failed_set(self) -> None:
        """Note that a transfer of a set has failed, or hangs."""
        self._sets_failed = time.monotonic()

    # Memory.

    def register(self, start: int, size: int) -> bool:
        """Register memory with the transport. False if it refuses.

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
        """Check which complete objects exist.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        codes = self._in_parts(lambda some: lambda store: store.batch_is_exist(some), names)
        there = codes.count(1)
        if there == len(codes):
            return [True] * there
        self._check_found([code for code in codes if code < 0])
        return [code == 1 for code in codes]

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects, also leased ones. False for each object that did not exist.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        codes = self._in_parts(lambda some: lambda store: store.batch_remove(some, True), names)
        self._check_found([code for code in codes if code])
        return [not code for code in codes]

    def _in_parts(
        self, request: Callable[[Sequence[str]], Callable[[Store], list[int]]], names: Sequence[str]
    ) -> list[int]:
        """Send a request for each `MAX_NAMES` names, and check that the master has answered."""
        codes = list[int]()
        for start in range(0, len(names), MAX_NAMES):
            some = names[start : start + MAX_NAMES]
            codes += self._answered(request(some), len(some))
        return codes

    def _check_found(self, codes: Sequence[int]) -> None:
        strange = [code for code in codes if code not in library.GONE]
        if strange:
            raise StorageUnavailableError(
                f"the master answered {strange[0]} to a request for an object"
            )

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
            StorageUnavailableError: the master does not answer.
        """
        # Other threads replace it meanwhile.
        now, seen = time.monotonic(), self._seen
        lately = {store: at for store, at in seen.items() if now - at < SEEN_SECONDS}
        if len(lately) == 1 and now < self._look_at and not self.stores.any_out():
            return dict.fromkeys(names, *lately)
        places = {name: copies[0] for name, copies in self.copies(names).items() if copies}
        self._look_at = now + LOOK_SECONDS
        self._seen = lately | dict.fromkeys(places.values(), now)
        if places and self.stores.any_out():
            # A lookup from before the master dropped a store names that one: the read would hang,
            # and be taken for one of a store that answers.
            self._answered(lambda store: store.batch_get_session_start([*places]), len(places))
        return places

    def copies(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the endpoints of the stores with copies of existing objects, in their order.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        if not names:
            return {}
        found = self._client().batch_get_replica_desc(names)
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
        return codes

    def _read_ranges(self, asked: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[int]:
        names, addresses, sizes = zip(*asked, strict=True)
        offsets = [list(accumulate(some[:-1], initial=0)) for some in sizes]
        codes = self._client().batch_get_into_multi_buffer_ranges(names, addresses, sizes, offsets)
        return _checked_length(codes, len(asked))

    def size(self, name: str) -> int:
        """Request the length of an object. Returns a code if it fails."""
        size: int = self._client().get_size(name)
        return size

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
        codes = self._client().batch_put_from_multi_buffer_ranges(names, addresses, sizes, offsets)
        if library.TRANSFER_FAILED in codes:
            self.note_failed_set()
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
        left = {*names}
        with contextlib.suppress(StorageUnavailableError):
            codes = self._asked(lambda store: store.batch_put_session_revoke(names), len(names))
            left.difference_update(_with_codes(names, codes, library.NOT_BEGUN))
        self._revoke_later(left)

    def revoke_pending(self) -> None:
        """Revoke the objects of earlier calls that could not be revoked then.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        if not self._unrevoked:
            return
        # One thread at a time: a second one would revoke names that were begun again meanwhile.
        with self._revoking:
            store = self._client()
            with self._lock:
                names = sorted(self._unrevoked)
            codes = _checked_length(store.batch_put_session_revoke(names), len(names))
            # Visible, only the response was lost: a second end closes the session.
            complete = _with_codes(names, codes, {library.INVALID_WRITE})
            if complete:
                store.batch_put_session_end(complete)
            with self._lock:
                self._unrevoked.difference_update(
                    complete, _with_codes(names, codes, library.NOT_BEGUN)
                )

    def _revoke_later(self, names: Iterable[str]) -> None:
        with self._lock:
            self._unrevoked.update(names)

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

    def left_out(self, names: Sequence[str]) -> set[str]:
        """Return those existing objects of which all copies lie on stores that are left out."""
        return self._with_all_copies(names, self.stores.is_out)

    def remove_lost(self, names: Sequence[str]) -> set[str]:
        """Remove those objects of which all copies lie on lost stores. Returns their names.

        Objects that another client has claimed are still there.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        lost = self._with_all_copies(names, self.stores.is_lost)
        if lost:
            with self.claimed(sorted(lost)) as claimed:
                # Others may have stored them anew meanwhile.
                again = self._with_all_copies(sorted(claimed), self.stores.is_lost)
                self.remove(sorted(again))
        return lost

    def _with_all_copies(self, names: Sequence[str], where: Callable[[str], bool]) -> set[str]:
        copies = self.copies(names).items()
        return {name for name, stores in copies if stores and all(map(where, stores))}

    def remove_prefix(self, prefix: str) -> None:
        """Remove all objects with a prefix, which must have no special character of a pattern.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        [code] = self._asked(lambda store: [store.remove_by_regex(f"^{prefix}.*", True)], 1)
        if code == library.RPC_TIMED_OUT:
            raise StorageTimeoutError(
                "the master has not answered in time whether it has removed objects"
            )
        if code < 0:
            raise StorageUnavailableError(
                f"the master answered {code} to a request to remove objects"
            )

    def _client(self) -> Store:
        """Return the library's client for a request.

        Raises:
            StorageUnavailableError: the last request had no response, and a probe has none now.
        """
        if self._suspect:
            # Fails faster than the library's own attempts to reconnect.
            check_master(self.settings)
            self._suspect = False
        return self._store

    def _asked(self, request: Callable[[Store], list[int]], count: int) -> list[int]:
        """Send a request, and once more after a dead connection if the master answers a probe."""
        if not count:
            return []
        store = self._client()
        codes = _checked_length(request(store), count)
        # Faster than a loop: most requests have no error.
        if min(codes) >= 0:
            self._suspect = False
            return codes
        # A request that was served in part is not repeated: some of its objects have changed. Nor
        # is one that has timed out: the master may still be at work on it.
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
        if codes and codes[0] in library.UNREACHABLE and library.UNREACHABLE.issuperset(codes):
            if codes[0] == library.RPC_TIMED_OUT:
                raise StorageTimeoutError("the master has not answered in time")
            raise StorageUnavailableError("the master cannot be reached")
        return codes

    def _master_responds(self) -> bool:
        try:
            check_master(self.settings)
        except StorageUnavailableError:
            return False
        return True


def _with_codes(names: Sequence[str], codes: Sequence[int], wanted: Collection[int]) -> list[str]:
    return [name for name, code in zip(names, codes, strict=True) if code in wanted]


def _checked_length(codes: list[int], count: int) -> list[int]:
    if len(codes) != count:
        raise StorageUnavailableError(
            f"the library answered for {len(codes)} objects and was asked for {count}"
        )
    return codes
