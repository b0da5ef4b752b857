"""The state machine in this process: no server, nothing durable, one process for each directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from msgspec import structs

from hicache_backends.hf3fs.client.directory import Directory
from hicache_backends.hf3fs.client.failures import MetadataError, refusal
from hicache_metadata_server import protocol as p
from hicache_metadata_server.clock import Clock
from hicache_metadata_server.service.limits import DEFAULTS
from hicache_metadata_server.service.refused import RefusedError
from hicache_metadata_server.service.service import MetadataService

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.objects import Call

A = TypeVar("A", bound=p.Answer)

LOCK_NAME: Final = "local.lock"
DUE: Final = 1024
"""Slots whose time has come that one call sees to beside its own work."""


class _State:
    """What all storages of this process on one directory share."""

    def __init__(self, path: str, quarantine_seconds: float) -> None:
        self.users, self._process = 0, os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock_file = os.open(os.path.join(path, LOCK_NAME), flags, 0o666)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_file)
            raise MetadataError(f"another process uses {path!r} without a metadata server; give both a metadata_url") from error
        unbounded = structs.replace(
            DEFAULTS, body_bytes=1 << 60, keys=1 << 40, scopes=1 << 20, quarantine_seconds=quarantine_seconds
        )
        self._service, self._clock = MetadataService(unbounded), Clock()
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
            "/v2/unpin": service.unpin,
            "/v2/touch": service.touch,
            "/v2/delete": service.delete,
            "/v2/clear": service.clear,
            "/v2/drop": service.drop,
            "/v2/inspect": service.inspect,
        }

    @property
    def about(self) -> p.About:
        return self._service.about

    def do(self, path: str, request: p.Request) -> Any:
        with self._lock:
            now = self._clock()
            self._service.settle(now, DUE)
            try:
                return self._operations[path](request, now)
            except RefusedError as error:
                raise refusal(error.status, error.problem.code, error.problem.message) from error
            finally:
                self._service.forget_changes()

    def close(self) -> None:
        # A child that was forked meanwhile has the lock by its copy of the descriptor, for as long as it lives; nor may it let go of ours.
        if os.getpid() == self._process:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        os.close(self._lock_file)


class LocalDirectory(Directory):
    """The same operations without a server. All of a process that name the same directory share one state, which ends with the
    last of them.

    Args:
        path: the store's directory, which is there.
        quarantine_seconds: how long slots rest; the first one on a directory says it.

    Raises:
        MetadataError: another process uses the directory.
        OSError: the directory cannot be written to.
    """

    _states: ClassVar[dict[tuple[int, str], _State]] = {}
    _states_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: str, *, quarantine_seconds: float) -> None:
        super().__init__()
        # A child that was forked has nothing to do with what its parent has open.
        self._place = (os.getpid(), os.path.realpath(path))
        with self._states_lock:
            state = self._states.get(self._place)
            if state is None:
                state = self._states[self._place] = _State(self._place[1], quarantine_seconds)
            state.users += 1
        self._state: _State | None = state

    @property
    def about(self) -> p.About:
        return self._open().about

    def refresh(self, call: Call) -> p.About:
        return self.about

    def send(self, path: str, request: p.Request, kind: type[A], call: Call) -> A:
        answer: A = self._open().do(path, request)
        return answer

    def send_later(self, path: str, request: p.Request) -> None:
        with contextlib.suppress(MetadataError):
            self._open().do(path, request)

    def close(self) -> None:
        with self._states_lock:
            state, self._state = self._state, None
            if state is None:
                return
            state.users -= 1
            if not state.users:
                del self._states[self._place]
                state.close()

    @classmethod
    def begin_in_child(cls) -> None:
        """A thread of the parent may have held the lock when this process was forked; it is not here to release it."""
        cls._states_lock = threading.Lock()

    def _open(self) -> _State:
        if self._state is None:
            raise MetadataError("the local directory of slots is closed")
        return self._state


os.register_at_fork(after_in_child=LocalDirectory.begin_in_child)
