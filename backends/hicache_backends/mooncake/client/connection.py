"""A client of the library that is set up: its calls with errors told apart, and what must outlive a call that is late."""

from __future__ import annotations

import contextlib
import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.client.in_flight import InFlight
from hicache_backends.mooncake.client.opening import PROBE_SECONDS, set_up, warm_up
from hicache_backends.mooncake.client.probe import check_master
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_backends.mooncake.client.library import Store
    from hicache_backends.mooncake.config import ClientSettings
    from hicache_storage.objects import Call

MOST_NAMES: Final = 50_000
"""In one request: the master takes about 3 us for each."""
LOOK_SECONDS: Final = 0.1
"""How often who waits for another call looks whether its own is still waited for."""


class Connection:
    """One client of one process. Safe for many threads.

    Several storages share it; `close` waits for none of their calls: the last one to come back closes.

    Raises:
        DriverUnavailableError: the library is missing or too old.
        StorageUnavailableError: the master cannot be reached, or refuses.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        if settings.master is not None:
            # Setting up holds the interpreter's lock: not for a master that hangs.
            check_master(settings.master, min(PROBE_SECONDS, settings.rpc_timeout_seconds))
        self._store = set_up(settings)
        self._lock = threading.Lock()
        self._calls = 0
        self._closing = False
        self._suspect = False
        self._memory = threading.Lock()
        """Guards what is registered. Calls do not wait for it: to pin a large pool takes long."""
        self._registered: dict[tuple[int, int], int] = {}
        self._settling = threading.Lock()
        self._unclaimed = threading.Condition()
        self._claimed = set[str]()
        """Names that a call has looked up and is reading."""
        self._stranded = set[str]()
        """Names that the library believes this client is still writing, after a write that could not be ended."""
        warm_up(self.exist)

    def close(self) -> None:
        """Disconnect, as soon as no call is in flight."""
        with self._lock:
            self._closing = True
            idle = not self._calls
        if idle:
            self._store.close()

    # Memory.

    def register(self, start: int, size: int) -> bool:
        """Make memory known to the transports; whether all of it is. Over TCP any memory can be transferred.

        What is registered already is counted, and stays until it has been unregistered as often.
        """
        with self._memory:
            count = self._registered.get((start, size), 0)
            if not count and self._store.register_buffer(start, size):
                return False
            self._registered[start, size] = count + 1
            return True

    def unregister(self, start: int, size: int) -> None:
        """Take back one `register`."""
        with self._memory:
            count = self._registered.pop((start, size), 0)
            if count > 1:
                self._registered[start, size] = count - 1
            elif count:
                self._store.unregister_buffer(start)

    # Requests. Answers are in the order of the names.

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there, whole, in one request; very many in several, so that each is answered in time.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        if len(names) <= MOST_NAMES:
            return self._exist(names)
        return [there for start in range(0, len(names), MOST_NAMES) for there in self._exist(names[start : start + MOST_NAMES])]

    def _exist(self, names: Sequence[str]) -> list[bool]:
        codes = self._answered(lambda store: store.batch_is_exist(names), len(names))
        there = codes.count(1)
        if there == len(codes):
            return [True] * there
        strange = [code for code in codes if code < 0 and code not in library.GONE]
        if strange:
            raise StorageUnavailableError(f"the master answered {strange[0]} to the question whether an object is there")
        return [code == 1 for code in codes]

    def read(self, names: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> list[int]:
        """Scatter each object to its addresses; its length, or a code. Names are distinct.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        return self._answered(lambda store: store.batch_get_into_multi_buffers(names, addresses, sizes), len(names))

    @contextlib.contextmanager
    def looked_up(self, names: Sequence[str], call: Call) -> Generator[list[int]]:
        """Look up objects for `read_ranges`, which may be called until the context ends: 0 or a code for each.

        The library remembers one lookup of a name: who comes while another call has it waits until that has ended.

        Raises:
            StorageUnavailableError: the master does not answer, or the time of the call has passed.
        """
        if not names:
            yield []
            return
        self._claim(names, call)
        try:
            with self._call() as store:
                try:
                    yield self._answered(lambda store: store.batch_get_session_start(names), len(names))
                finally:
                    store.batch_get_session_end(names)
        finally:
            with self._unclaimed:
                self._claimed.difference_update(names)
                self._unclaimed.notify_all()

    def _claim(self, names: Sequence[str], call: Call) -> None:
        with self._unclaimed:
            while not self._claimed.isdisjoint(names):
                if call.expired():
                    raise StorageTimeoutError("another call is reading the same objects, and has not ended in time")
                self._unclaimed.wait(LOOK_SECONDS)
            self._claimed.update(names)

    def read_ranges(self, names: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> list[int]:
        """Scatter the first bytes of objects that were looked up to their addresses; how many, or a code.

        Nothing arrives after it has returned. Transfers come one after the other, and the library's caller sleeps meanwhile. One
        that hangs is given up after 30 s, and the next begins.
        """
        offsets = [list(accumulate(some[:-1], initial=0)) for some in sizes]
        with self._call() as store:
            codes = store.batch_get_into_multi_buffer_ranges(names, addresses, sizes, offsets)
        return _fitting(codes, len(names))

    def size(self, name: str) -> int:
        """Length of an object, or a code."""
        with self._call() as store:
            return store.get_size(name)

    def begin(self, names: Sequence[str], sizes: Sequence[int], config: object) -> list[int]:
        """Begin to write objects that are not there; 0 or a code.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        return self._answered(lambda store: store.batch_put_session_start(names, sizes, config), len(names))

    def transfer(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[bool]:
        """Gather the bytes of objects that were begun; whether all of an object's have arrived."""
        with self._call() as store:
            codes = store.batch_put_from_multi_buffer_ranges(names, addresses, sizes, offsets)
        return [code >= 0 for code in _fitting(codes, len(names))]

    def publish(self, names: Sequence[str]) -> list[bool]:
        """Make objects visible whose bytes have arrived; whether they certainly are. What is not is withdrawn."""
        try:
            codes = self._asked(lambda store: store.batch_put_session_end(names), len(names))
        except StorageUnavailableError:
            self._strand(names)
            raise
        failed = [name for name, code in zip(names, codes, strict=True) if code]
        if failed:
            self.withdraw(failed)
        return [not code for code in codes]

    def withdraw(self, names: Sequence[str]) -> None:
        """Give up objects that were begun, now or, if the master does not answer, before the next are begun."""
        try:
            codes = self._asked(lambda store: store.batch_put_session_revoke(names), len(names))
        except StorageUnavailableError:
            self._strand(names)
        else:
            self._strand([name for name, code in zip(names, codes, strict=True) if code not in library.NOT_BEGUN])

    def settle(self) -> None:
        """Try once more to give up what could not be given up before.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        if not self._stranded:
            return
        # One at a time: who comes second must not give up what somebody has begun anew meanwhile.
        with self._settling, self._call() as store:
            with self._lock:
                names = sorted(self._stranded)
            codes = _fitting(store.batch_put_session_revoke(names), len(names)) if names else []
            complete = [name for name, code in zip(names, codes, strict=True) if code == library.INVALID_WRITE]
            if complete:
                # It was made visible, and only the answer was lost: ending it again ends the session.
                store.batch_put_session_end(complete)
            given_up = [name for name, code in zip(names, codes, strict=True) if code in library.NOT_BEGUN]
            with self._lock:
                self._stranded.difference_update(given_up, complete)

    def _strand(self, names: Sequence[str]) -> None:
        with self._lock:
            self._stranded.update(names)

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects, leased ones too; which were there.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        return [gone for start in range(0, len(names), MOST_NAMES) for gone in self._remove(names[start : start + MOST_NAMES])]

    def _remove(self, names: Sequence[str]) -> list[bool]:
        codes = self._answered(lambda store: store.batch_remove(names, True), len(names))
        strange = [code for code in codes if code and code not in library.GONE]
        if strange:
            raise StorageUnavailableError(f"the master answered {strange[0]} to a request to remove an object")
        return [not code for code in codes]

    def remove_prefix(self, prefix: str) -> None:
        """Remove all objects whose names begin so; `prefix` has no character that means something in a pattern.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        with self._call() as store:
            code = store.remove_by_regex(f"^{prefix}.*", True)
            if code == library.RPC_FAILED and self._is_there():
                code = store.remove_by_regex(f"^{prefix}.*", True)
        if code == library.RPC_TIMED_OUT:
            raise StorageTimeoutError("the master has not answered in time whether it has removed objects")
        if code < 0:
            raise StorageUnavailableError(f"the master answered {code} to a request to remove objects")

    def _call(self) -> InFlight[Store]:
        return InFlight(self._begin, self._leave)

    def _begin(self) -> Store:
        with self._lock:
            if self._closing:
                raise StorageUnavailableError("the connection is closed")
            self._calls += 1
            suspect = self._suspect
        if suspect and self.settings.master is not None:
            try:
                # Known to be away: learn it at once, and not after the library's own attempts to reconnect.
                check_master(self.settings.master, min(PROBE_SECONDS, self.settings.rpc_timeout_seconds))
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
        """Codes of a request, made twice if the library has found one of its connections dead and the master is there."""
        with self._call() as store:
            codes = _fitting(request(store), count)
            if not _any_failed(codes):
                self._suspect = False
                return codes
            if codes.count(library.RPC_FAILED) == count and self._is_there():
                codes = _fitting(request(store), count)
        self._suspect = any(code in library.UNREACHABLE for code in codes)
        return codes

    def _answered(self, request: Callable[[Store], list[int]], count: int) -> list[int]:
        """Codes of a request that the master has answered.

        Raises:
            StorageUnavailableError: it has not, for any of the objects; or the answer is of another length.
        """
        codes = self._asked(request, count)
        if codes and codes[0] in library.UNREACHABLE and all(code in library.UNREACHABLE for code in codes):
            if codes[0] == library.RPC_TIMED_OUT:
                raise StorageTimeoutError("the master has not answered in time")
            raise StorageUnavailableError("the master cannot be reached")
        return codes

    def _is_there(self) -> bool:
        if self.settings.master is None:
            return True
        try:
            check_master(self.settings.master, min(PROBE_SECONDS, self.settings.rpc_timeout_seconds))
        except StorageUnavailableError:
            return False
        return True


def _any_failed(codes: Sequence[int]) -> bool:
    """Quicker than to look at each: most requests fail for no object."""
    return min(codes, default=0) < 0


def _fitting(codes: list[int], count: int) -> list[int]:
    if len(codes) != count:
        raise StorageUnavailableError(f"the library answered for {len(codes)} objects and was asked for {count}")
    return codes
