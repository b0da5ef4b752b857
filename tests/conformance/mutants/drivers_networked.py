"""A right driver across a network, made of small steps, and drivers with one planted fault each."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from drivers_server import receive, send

from hicache_storage.objects import Call, ObjectRead, ObjectStorage
from hicache_storage.spec import (
    Capabilities,
    DriverConfig,
    Durability,
    HungReads,
    Sharing,
    StorageTimeoutError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import LookupBatch, Namespace, ObjectWrite, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity

ACROSS = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.PROCESS,
    deletes=True,
    clears=True,
    networked=True,
    hung_reads=HungReads.BOUNCE_BUFFER,
)
CONNECT_SECONDS = 2.0


class NetworkedConfig(DriverConfig, frozen=True, kw_only=True):
    port: int | str


class Networked(ObjectStorage):
    """Keeps pages on a server.

    Each call is one request on a connection that is kept for the next.
    """

    promises: ClassVar[Capabilities] = ACROSS

    def __init__(self, identity: StorageIdentity, config: NetworkedConfig) -> None:
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        self.port = int(config.port)
        self.idle: list[socket.socket] = []
        self.lock = threading.Lock()
        self.gone = False

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def name(self, namespace: Namespace, key: str) -> str:
        return f"{namespace.name}/{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def fresh(self, call: Call) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=self.seconds(call))

    def seconds(self, call: Call) -> float | None:
        return call.timeout(30.0)

    def talk(self, connection: socket.socket, call: Call, request: tuple[Any, ...]) -> Any:
        connection.settimeout(self.seconds(call))
        send(connection, request)
        answer = receive(connection)
        if answer is None:
            raise ConnectionError("the server has closed the connection")
        return answer

    def asked(self, call: Call, *request: Any) -> Any:
        """One request; on a new connection where the old one turns out to be dead."""
        kept = self.taken()
        if kept is not None:
            try:
                return self.given_back(kept, self.talk(kept, call, request))
            except (OSError, msgspec.DecodeError):
                kept.close()
            except BaseException:
                kept.close()
                raise
        if call.expired():
            raise StorageTimeoutError("the server did not answer in time")
        connection = self.fresh(call)
        try:
            return self.given_back(connection, self.talk(connection, call, request))
        except (OSError, msgspec.DecodeError) as error:
            connection.close()
            raise StorageUnavailableError(f"no answer from the server: {error}") from error

    def taken(self) -> socket.socket | None:
        with self.lock:
            return self.idle.pop() if self.idle else None

    def given_back(self, connection: socket.socket, answer: Any) -> Any:
        with self.lock:
            if not self.gone:
                self.idle.append(connection)
                return answer
        connection.close()
        return answer

    # The driver
    # --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        self.asked(Call(CONNECT_SECONDS), "exists", [])

    def disconnect(self) -> None:
        with self.lock:
            self.gone = True
            idle = self.idle
            self.idle = []
        for connection in idle:
            connection.close()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        names = [[self.name(batch.namespace, key) for key in batch.keys] for batch in batches]
        return _split(self.asked(call, "exists", _joined(names)), names)

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        names = [
            [self.name(batch.namespace, read.key) for read in batch.reads] for batch in batches
        ]
        pages = _split(self.asked(call, "get", _joined(names)), names)
        return [
            [read.fill(page) for read, page in zip(batch.reads, some, strict=True)]
            for batch, some in zip(batches, pages, strict=True)
        ]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        writes = [
            [(self.name(batch.namespace, write.key), write) for write in batch.writes]
            for batch in batches
        ]
        return _split(self.put(_joined(writes), call), writes)

    def put(self, writes: list[tuple[str, ObjectWrite]], call: Call) -> list[bool]:
        pages = [(name, write.tobytes()) for name, write in writes]
        if call.expired():
            raise StorageTimeoutError("too late to store anything")
        return self.asked(call, "put", pages, [name for name, write in writes if write.replaces])

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            names = [self.name(batch.namespace, read.key) for read in batch.reads]
            pages = self.asked(call, "get", names)
            found = zip(names, batch.reads, pages, strict=True)
            # What is dropped is what was looked at, and not what somebody puts in its place
            # meanwhile.
            self.asked(
                call,
                "drop",
                [
                    (name, page)
                    for name, read, page in found
                    if page is not None and not _is_whole(read, page)
                ],
            )
        return True

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        names = [[self.name(batch.namespace, key) for key in batch.keys] for batch in batches]
        return _split(self.asked(call, "delete", _joined(names)), names)

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        for namespace in namespaces:
            self.asked(call, "clear", f"{namespace.name}/")


def _joined(parts: Sequence[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


def _split(answers: list[Any], shape: Sequence[Sequence[object]]) -> list[list[Any]]:
    if len(answers) != sum(map(len, shape)):
        raise StorageUnavailableError("the server answered for another number of pages")
    told = iter(answers)
    return [[next(told) for _ in some] for some in shape]


def _is_whole(read: ObjectRead, page: bytes) -> bool:
    again = ObjectRead(
        read.namespace, read.key, [memoryview(bytearray(len(buffer))) for buffer in read.buffers]
    )
    return again.fill(page) and again.verify()


class NeverReconnects(Networked):
    """Goes on with the connection that it has opened first, dead or not."""

    def asked(self, call: Call, *request: Any) -> Any:
        with self.lock:
            if not self.idle:
                self.idle.append(self.fresh(call))
            try:
                return self.talk(self.idle[0], call, request)
            except msgspec.DecodeError as error:
                raise StorageUnavailableError(str(error)) from error


class WaitsForEver(Networked):
    """Has no timeout, and says that it needs none."""

    promises = Capabilities(
        sharing=Sharing.PROCESSES,
        durability=Durability.PROCESS,
        deletes=True,
        clears=True,
        networked=True,
        may_hang=False,
    )

    def seconds(self, call: Call) -> float | None:
        return None


class LeavesItToTheDeadline(Networked):
    """Has no timeout, since the layer above has one."""

    def seconds(self, call: Call) -> float | None:
        return None


class AsksAgainAndAgain(Networked):
    """Tries again until the server answers, whoever waits, and says that it cannot hang."""

    promises = WaitsForEver.promises

    def seconds(self, call: Call) -> float | None:
        return 1.0

    def asked(self, call: Call, *request: Any) -> Any:
        # Not for good, so that the suite's own patience decides how long the sample takes.
        until = time.monotonic() + 12.0
        while True:
            try:
                return super().asked(call, *request)
            except (OSError, StorageUnavailableError):
                if self.gone or time.monotonic() > until:
                    raise
                time.sleep(0.02)


class TakesAnythingForAnAnswer(Networked):
    """Answers False for an error without telling anybody that it was one."""

    def asked(self, call: Call, *request: Any) -> Any:
        try:
            return super().asked(call, *request)
        except (OSError, StorageUnavailableError):
            return [None if request[0] == "get" else False] * len(request[1])
