"""The Mooncake driver: each page is one object, with its components and its envelope."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import threading
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from hicache_backends.mooncake.client.connection import max_lookup_seconds
from hicache_backends.mooncake.client.handle import ConnectionHandle
from hicache_backends.mooncake.config import client_settings
from hicache_backends.mooncake.memory import BLOCK_BYTES, regions_of
from hicache_backends.mooncake.names import names_of, object_names, prefix_of
from hicache_backends.mooncake.plugin import CAPABILITIES
from hicache_backends.mooncake.reader import PageReader, read_verified
from hicache_backends.mooncake.stores import MAX_HUNG, POOL_THREADS
from hicache_backends.mooncake.writer import CHUNK_BYTES, MAX_HUNG_SETS, PageWriter
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import ObjectRead, ObjectStorage
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import (
    Durability,
    Health,
    HungReads,
    InvalidPoolError,
    PoolName,
    StorageTimeoutError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.config import ClientSettings, MooncakeConfig
    from hicache_storage.objects import (
        Call,
        LookupBatch,
        Namespace,
        ObjectWrite,
        ReadBatch,
        RegisteredPool,
        WriteBatch,
    )
    from hicache_storage.spec import StorageIdentity

logger = logging.getLogger(__name__)

HEALTH_OBJECT = "hicache-health"
CLOSE_SECONDS = 1.0
"""Limit of `close` for threads whose transfers go on after their calls have been given up."""
BUFFER_BYTES = 256 << 20
"""Size of each buffer for reads over TCP, which one object fits into at least. Little of it is in
memory: requests are shorter, unless an object is longer."""
HOSTNAME_FIX = "set it to an address of this node that every node reaches"
HOSTNAME_SECONDS = 2.0
_HOST = re.compile(r"\[(.+)\](?::\d+)?|([^:]+)(?::\d+)?")


class MooncakeStorage(ObjectStorage):
    """Storage on Mooncake Store.

    A stored page is visible to the next call of every storage with the same master and tenant,
    until it is evicted, or until the node that keeps it leaves.

    Raises:
        ConfigError: a setting is missing or has no usable value.
    """

    writes_find_existing = True

    def __init__(self, identity: StorageIdentity, config: MooncakeConfig) -> None:
        self._config = config
        self._settings = client_settings(config)
        self._is_over_tcp = self._settings.protocol == "tcp"
        super().__init__(
            identity,
            driver_name="mooncake",
            capabilities=replace(
                CAPABILITIES,
                # Memory that this process lends leaves with it, and so do the pages in it.
                durability=Durability.NONE
                if self._settings.global_segment_size
                else Durability.REOPEN,
                lookup_seconds=max_lookup_seconds(self._settings),
                hung_reads=HungReads.BOUNCE_BUFFER if self._is_over_tcp else HungReads.WAIT,
            ),
            verifies_checksums=config.verify_checksums,
        )
        self._handle: ConnectionHandle | None = None
        self._admitted: dict[PoolName, RegisteredPool] = {}
        self._connecting = threading.Lock()
        """Guards both: a pool is registered either by `connect`, or by `admit_pool` later."""

    @property
    def handle(self) -> ConnectionHandle:
        """The handle on the open connection.

        Raises:
            StorageUnavailableError: the storage is not open.
        """
        if self._handle is None:
            raise StorageUnavailableError("mooncake: the store is not open")
        return self._handle

    def admit_pool(self, pool: RegisteredPool) -> None:
        if not self._is_over_tcp and not regions_of(pool.access):
            raise InvalidPoolError(
                f"pool {pool.name!r} has no addresses in host memory, which "
                f"{self._settings.protocol} needs; use a layout that has "
                "(page_first, page_first_direct), or protocol 'tcp'"
            )
        if self._is_over_tcp and pool.namespace.object_bytes > BUFFER_BYTES:
            raise InvalidPoolError(
                f"pool {pool.name!r}: a page and its envelope have {pool.namespace.object_bytes} "
                f"bytes, and over tcp {BUFFER_BYTES} are the most; use a smaller page"
            )
        with self._connecting:
            if self._handle is not None:
                _register(self._handle, pool)
            self._admitted[pool.name] = pool

    def connect(self) -> None:
        check_local_hostname(self._settings)
        with self._connecting:
            handle = ConnectionHandle(self._settings)
            # Of their own: where sets hang, gets still find threads.
            thread_pools = [
                ThreadPool("hicache-mooncake-get", POOL_THREADS, MAX_HUNG),
                ThreadPool("hicache-mooncake-set", POOL_THREADS, MAX_HUNG_SETS),
            ]
            make_buffers = partial(
                Buffers, limit=POOL_THREADS + MAX_HUNG, on_new=handle.register_buffer
            )
            try:
                for pool in self._admitted.values():
                    _register(handle, pool)
                self._reader = PageReader(
                    make_buffers(BUFFER_BYTES if self._is_over_tcp else BLOCK_BYTES),
                    thread_pools[0],
                    handle,
                    direct=not self._is_over_tcp,
                )
                self._writer = PageWriter(
                    make_buffers(CHUNK_BYTES if self._is_over_tcp else BLOCK_BYTES),
                    self._config.replica_num,
                    self._config.wait_seconds,
                    thread_pools[1],
                    handle,
                    gathers=self._is_over_tcp,
                )
            except BaseException:
                handle.close()
                raise
            self._handle = handle
            self._thread_pools = thread_pools

    def disconnect(self) -> None:
        handle = self.handle
        self._handle = None
        # The threads first, because they use the connection.
        for thread_pool in self._thread_pools:
            thread_pool.close(CLOSE_SECONDS)
        handle.close()

    def check_health(self) -> Health:
        with self.handle as connection:
            connection.exist([HEALTH_OBJECT])
        segment = self._settings.global_segment_size
        name = self._settings.local_hostname
        lent = f"lending {segment:,} bytes as {name}" if segment else "lending no memory"
        return Health(
            ok=True,
            detail=f"master {self._settings.master_server_address}, {self._settings.protocol}, "
            f"{lent}",
        )

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        with self.handle as connection:
            answers = connection.exist(_names(batches))
        return _by_batch(batches, answers)

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        with self.handle as connection:
            outcome = read_verified(
                self._reader, connection, [read for batch in batches for read in batch.reads], call
            )
        self.note_partial_faults(outcome.faults, served=bool(outcome.arrived))
        return [[read in outcome.arrived for read in batch.reads] for batch in batches]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        writes = [write for batch in batches for write in batch.writes]
        with self.handle as connection:
            # The library overwrites nothing, and takes what is still damaged as stored.
            damaged = [write for write in writes if write.replaces]
            there = self._discard(connection, damaged, call) if damaged else set[str]()
            outcome = self._writer.write(
                connection,
                [w for w, name in zip(writes, names_of(writes), strict=True) if name not in there]
                if there
                else writes,
                call,
            )
        self.note_partial_faults(outcome.faults, served=bool(outcome.stored))
        return [[write in outcome.stored for write in batch.writes] for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        names = _names(batches)
        # Each name once: the rules count a repeated key as removed once.
        distinct = list(dict.fromkeys(names))
        with self.handle as connection:
            removed = {
                name for name, ok in zip(distinct, connection.remove(distinct), strict=True) if ok
            }
        return _by_batch(batches, [_take(removed, name) for name in names])

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        with self.handle as connection:
            for name in dict.fromkeys(namespace.name for namespace in namespaces):
                if call.expired():
                    raise StorageTimeoutError(
                        "mooncake: the deadline of the clear has passed; some pages are still there"
                    )
                connection.remove_prefix(prefix_of(name))

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        with self.handle as connection:
            return not self._discard(
                connection, [read for batch in batches for read in batch.reads], call
            )

    def _discard(
        self, connection: Connection, pages: Sequence[ObjectRead | ObjectWrite], call: Call
    ) -> set[str]:
        """Read objects again and remove the damaged ones: others may have been repaired since.

        Returns:
            Names of objects that may still be damaged.
        """
        named = dict(zip(names_of(pages), pages, strict=True))
        verifies = self._config.verify_checksums
        with connection.claimed(list(named)) as claimed:
            again = {
                ObjectRead.aside(page.namespace, page.key, verifies_checksum=verifies): name
                for name, page in named.items()
                if name in claimed
            }
            outcome = read_verified(self._reader, connection, list(again), call)
            connection.remove(
                [
                    name
                    for read, name in again.items()
                    if read.damaged or (read in outcome.arrived and not read.verify())
                ]
            )
        return set(named) if outcome.faults else set(named) - claimed


def _register(handle: ConnectionHandle, pool: RegisteredPool) -> None:
    handle.register(str(pool.name), regions_of(pool.access), pool.access)


def _names(batches: Sequence[LookupBatch]) -> list[str]:
    return list(chain.from_iterable(object_names(batch.namespace, batch.keys) for batch in batches))


def _by_batch(batches: Sequence[LookupBatch], answers: Sequence[bool]) -> list[list[bool]]:
    every = iter(answers)
    return [list(islice(every, len(batch.keys))) for batch in batches]


def _take(names: set[str], name: str) -> bool:
    found = name in names
    names.discard(name)
    return found


def check_local_hostname(settings: ClientSettings) -> None:
    """Check that `local_hostname` leads to this node, before memory is lent under it.

    Transfers to that memory connect to this name, those of this process too. Over TCP nothing
    connects to a client that lends none, and with a metadata server the name is no address.

    Raises:
        StorageUnavailableError: the name cannot be resolved, or does not lead here.
    """
    pure_client = settings.protocol == "tcp" and not settings.global_segment_size
    if settings.metadata_server != "P2PHANDSHAKE" or pure_client:
        return
    name = settings.local_hostname
    match = _HOST.fullmatch(name)
    host = (match[1] or match[2]) if match else name
    # As the library does: over IPv4 alone, unless the operator has set this.
    ipv6 = "MC_USE_IPV6" in os.environ
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        with socket.create_server(("", 0), family=family, dualstack_ipv6=ipv6) as listener:
            listener.settimeout(HOSTNAME_SECONDS)
            with socket.create_connection((host, listener.getsockname()[1]), HOSTNAME_SECONDS):
                # The connection may have been accepted by another node.
                listener.accept()[0].close()
    except (OSError, UnicodeError) as error:
        raise StorageUnavailableError(
            f"local_hostname is {name!r}, which does not lead to this node ({error}): {HOSTNAME_FIX}"
        ) from error
    master = settings.master
    if master is not None and _is_loopback(host) and not _is_loopback(master[0]):
        logger.warning(
            "mooncake: local_hostname is %r, under which only this node reaches the memory that it "
            "lends; where the master %s has clients on others, %s",
            name,
            settings.master_server_address,
            HOSTNAME_FIX,
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return False
    return address.is_loopback or address.is_unspecified
