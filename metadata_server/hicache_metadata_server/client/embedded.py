"""The metadata server's state machine inside the driver's process, without durability."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import MetadataError, error_of_response
from hicache_metadata_server.client.metadata_client import MetadataClient
from hicache_metadata_server.core.changes import SteadyClock
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.objects import Call

A = TypeVar("A", bound=p.Answer)

LOCK_NAME: Final = "local.lock"
ID_BYTES: Final = 8
MAX_EXPIRIES: Final = 1024
"""Ended leases and quarantines that one call processes beside its own work."""


class _State:
    """State shared by all storages of this process on one directory.

    `lock_file` is open; it is locked here, and closed with the state or at an error.
    """

    def __init__(self, path: str, lock_file: int, quarantine_seconds: float) -> None:
        self.users = 0
        self._process = os.getpid()
        self._lock_file = lock_file
        try:
            self.store_id = _lock(lock_file, path)
        except BaseException:
            os.close(lock_file)
            raise
        # Without limits of size: limits protect a server from other processes.
        unbounded = structs.replace(
            DEFAULTS,
            body_bytes=1 << 60,
            keys=1 << 40,
            scopes=1 << 20,
            quarantine_seconds=quarantine_seconds,
        )
        self._service = MetadataService(unbounded)
        self.about = self._service.about
        self._clock = SteadyClock()
        self._lock = threading.Lock()
        service = self._service
        self._operations: dict[str, Callable[[Any, float], Any]] = {
            "/v2/initialize": service.initialize,
            "/v2/describe": service.describe,
            "/v2/lookup": service.lookup,
            "/v2/reserve": service.reserve,
            "/v2/commit": service.commit,
            "/v2/abort": service.abort,
            "/v2/renew": service.renew,
            "/v2/delete": service.delete,
            "/v2/clear": service.clear,
            "/v2/removals": service.collect_removals,
            "/v2/drop": service.drop,
            "/v2/inspect": service.inspect,
        }

    def execute(self, path: str, request: p.Request) -> Any:
        with self._lock:
            try:
                return self._operations[path](request, self._settle())
            except RequestError as error:
                raise error_of_response(
                    error.status, error.problem.code, error.problem.message
                ) from error
            finally:
                self._service.forget_changes()

    def present(
        self, scopes: Sequence[p.LookupScope], lengths: Sequence[int]
    ) -> list[list[bool]] | None:
        service = self._service
        found: list[list[bool]] = []
        with self._lock:
            # What this changes is forgotten after the next request. A lookup changes nothing that
            # a log would have.
            self._settle()
            for part, length in zip(scopes, lengths, strict=True):
                if part.scope not in service.scopes:
                    return None
                found.append(service.present(part.scope, part.keys, length))
        return found

    def _settle(self) -> float:
        """Process what is due, which a server does in the background; return the time."""
        now = self._clock()
        self._service.settle(now, MAX_EXPIRIES)
        return now

    def close(self) -> None:
        # A forked child shares the lock through its copy of the descriptor: closing ours would not
        # release the lock, and a child must not release the parent's.
        if os.getpid() == self._process:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        os.close(self._lock_file)


class EmbeddedMetadata(MetadataClient):
    """A metadata client without a server.

    All clients of a process on one directory, which must exist, share one state; it ends with the
    last of them. The first one sets the quarantine of freed slots, in seconds.

    Raises:
        MetadataError: another process uses the directory.
        OSError: the directory cannot be written to.
    """

    _states: ClassVar[dict[tuple[int, int, int], _State]] = {}
    _states_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: str, *, quarantine_seconds: float) -> None:
        super().__init__()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock_file = os.open(os.path.join(path, LOCK_NAME), flags, 0o666)
        status = os.fstat(lock_file)
        # The file and not its path: once the directory was emptied, the path leads to a file that
        # another process may lock. A forked child must not use its parent's state.
        self._key = (os.getpid(), status.st_dev, status.st_ino)
        with self._states_lock:
            state = self._states.get(self._key)
            if state is None:
                state = self._states[self._key] = _State(path, lock_file, quarantine_seconds)
            else:
                os.close(lock_file)
            state.users += 1
        self.store_id = state.store_id
        """Name of the map; another one for each lock file."""
        self._state: _State | None = state

    @property
    def about(self) -> p.About:
        return self._open().about

    def refresh(self, call: Call) -> p.About:
        return self.about

    def present_in_memory(
        self, scopes: Sequence[p.LookupScope], lengths: Sequence[int]
    ) -> list[list[bool]] | None:
        return self._open().present(scopes, lengths)

    def send(self, path: str, request: p.Request, response_type: type[A], call: Call) -> A:
        response: A = self._open().execute(path, request)
        return response

    def send_later(self, path: str, request: p.Request) -> None:
        with contextlib.suppress(MetadataError):
            self._open().execute(path, request)

    def close(self) -> None:
        with self._states_lock:
            state = self._state
            self._state = None
            if state is None:
                return
            state.users -= 1
            if not state.users:
                del self._states[self._key]
                state.close()

    @classmethod
    def reset_after_fork(cls) -> None:
        """Replace the lock in a forked child."""
        # A thread of the parent may have held it, and that thread does not exist here.
        cls._states_lock = threading.Lock()

    def _open(self) -> _State:
        if self._state is None:
            raise MetadataError("the embedded metadata is closed")
        return self._state


def _lock(lock_file: int, path: str) -> str:
    """Lock a file, and return the id in it; draw the id if there is none."""
    # Two processes with a state machine each would give the same slot to different keys.
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise MetadataError(
            f"another process uses {path!r} without a metadata server; give both a metadata_url"
        ) from error
    found = os.pread(lock_file, ID_BYTES, 0)
    if not re.fullmatch(rb"[0-9a-f]{8}", found):
        found = secrets.token_hex(4).encode()
        os.pwrite(lock_file, found, 0)
    return found.decode()


os.register_at_fork(after_in_child=EmbeddedMetadata.reset_after_fork)
