"""An open store: everything that exists between `connect` and `disconnect`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.file.board import Board, Notices
from hicache_backends.file.capacity import Capacity, Shelves
from hicache_backends.file.catalog import Catalog
from hicache_backends.file.changes import Changes
from hicache_backends.file.clock import Clock
from hicache_backends.file.drafts import Drafts
from hicache_backends.file.names import random_writer
from hicache_backends.file.reader import PIECE_BYTES as READ_BYTES
from hicache_backends.file.reader import Reader
from hicache_backends.file.rewriter import Rewriter
from hicache_backends.file.shelf import never
from hicache_backends.file.stamp import Stamp
from hicache_backends.file.tree import Tree, sync_directory
from hicache_backends.file.writer import MAX_BUNDLE_BYTES, PIECE_BYTES, Writer
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.descriptors import Descriptors
from hicache_backends.posix.mounts import mount_of
from hicache_backends.posix.workers import Workers
from hicache_storage.spec import ConfigError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_backends.file.config import FileConfig
    from hicache_backends.file.shelf import Bundle
    from hicache_storage.objects import Namespace

logger = logging.getLogger(__name__)

LOCAL_THREADS = 4
NETWORK_THREADS = 8

LOCAL_BYTES_PER_THREAD = 16 << 20
"""From the page cache, a second thread gains up to 1.7x at 32 MiB a call and above, and nothing at 8 MiB."""

NETWORK_BYTES_PER_THREAD = 4 << 20

FLUSH_SECONDS = 5.0
"""How long other processes may not know of this one's uses of a bundle, which decide about what is evicted."""

FLUSHED_BUNDLES = 1024
"""Most bundles whose times are set at a time."""

COLLECT_SECONDS = 300.0
"""How often event logs of bundles that are gone are removed."""

ADJUST_SECONDS = 60.0
"""A clock that is set while a store with a capacity is open is noticed after so long; else after `COLLECT_SECONDS`."""

CLOSE_SECONDS = 5.0


class Store:
    """A store's directory, opened by one storage.

    Args:
        config: the storage's options.
        evicted: told the namespace and the number of pages that were evicted.
        damaged: told the namespace and the number of pages that were found damaged while others were copied.

    Raises:
        ConfigError: the path is no directory.
        StorageUnavailableError: the directory cannot be made, listed or written to.
    """

    def __init__(
        self,
        config: FileConfig,
        evicted: Callable[[Namespace, int], None],
        damaged: Callable[[Namespace, int], None],
    ) -> None:
        self.path = os.path.abspath(config.path)
        self.tree = Tree(self.path)
        self._create(syncs=config.fsync)
        mount = mount_of(self.path)
        self.is_local = mount.is_local
        asks_server, writer_name = not mount.is_local, random_writer()
        direct = mount.favours_direct_reads if config.direct_io is None else config.direct_io
        threads = config.threads or _default_threads(mount.is_local and not direct)
        self.workers = Workers(threads - 1)
        self.descriptors = Descriptors(config.open_files)
        self.clock = Clock()
        self._stamp = Stamp(self.tree.stamp, asks_server=asks_server)
        self.board = Board(self.tree, self._stamp, writer_name, asks_server=asks_server, syncs=config.fsync)
        self.shelves = Shelves(self.tree, self.board, asks_server=asks_server)
        self.drafts = Drafts(
            self.tree,
            writer_name,
            self.descriptors,
            self.clock,
            asks_server=asks_server,
            abandoned_seconds=config.abandoned_seconds,
        )
        self.changes = Changes(
            self.tree, self.board, self.drafts, self.clock,
            asks_server=asks_server, syncs=config.fsync, abandoned_seconds=config.abandoned_seconds,
        )  # fmt: skip
        self.rewriter = Rewriter(self.board, self.drafts, self.descriptors, self.changes, damaged, syncs=config.fsync)
        self.may_hang = not mount.is_memory or config.hung_reads == "bounce_buffer"
        waits = config.hung_reads == "wait" or not self.may_hang
        self.buffers = None if waits else Buffers(READ_BYTES)
        self.reader = self._make_reader(config, threads=threads, direct=direct)
        self.writer = Writer(
            self.drafts,
            self.clock,
            preallocates=mount.preallocates,
            syncs=config.fsync,
            threads=threads,
            piece_bytes=PIECE_BYTES if mount.is_local else MAX_BUNDLE_BYTES,
        )
        self._catalogs: dict[str, Catalog] = {}
        self._lock = threading.Lock()
        self._epoch = 0
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        self._collect_at = time.monotonic() + COLLECT_SECONDS
        self.capacity = None if config.capacity_bytes is None else self._make_capacity(config.capacity_bytes, evicted)
        self._tidy()

    def catalogs(self, namespaces: Sequence[Namespace], expired: Callable[[], bool] = never) -> list[Catalog]:
        """The namespaces' catalogs, up to date with all that was announced before this call.

        Args:
            expired: whether the call's deadline has passed. What has not been read by then is read by the next call, and
                its pages are misses until then.

        Raises:
            OSError: the store is away.
        """
        notices = self._read_board()
        catalogs = self.known_catalogs(namespaces)
        for catalog in catalogs:
            catalog.catch_up(notices, expired)
        return catalogs

    def cached_catalogs(self, namespaces: Sequence[Namespace]) -> list[Catalog] | None:
        """Answer `catalogs` without I/O, and without a lock that is held during I/O; None where that is not possible."""
        # Across a network even the stamp takes a request.
        notices = self.board.read_cached() if self.is_local else None
        if notices is None or notices.epoch != self._epoch:
            return None
        known = [self._catalogs.get(namespace.name) for namespace in namespaces]
        current = [catalog for catalog in known if catalog is not None and catalog.is_current(notices)]
        return current if len(current) == len(known) else None

    def known_catalogs(self, namespaces: Sequence[Namespace]) -> list[Catalog]:
        """The namespaces' catalogs as they are, which costs no request."""
        return [self._catalogs.get(namespace.name) or self._open(namespace) for namespace in namespaces]

    def distrust(self, bundles: Iterable[Bundle]) -> None:
        """List the namespaces of bundles again, whose files seem to be gone."""
        for namespace in {bundle.namespace for bundle in bundles}:
            self.shelves.get(namespace).distrust()

    def after_call(self, *, may_wait: bool = True) -> None:
        """Do now and then what must not make a call wait.

        Args:
            may_wait: whether idle files are closed in this thread, which waits on a stalled disk.
        """
        if may_wait:
            self.descriptors.expire()
        elif self.descriptors.has_idle():
            self.workers.start(self.descriptors.expire)
        if time.monotonic() >= self._collect_at:
            self._collect_at = time.monotonic() + COLLECT_SECONDS
            self.workers.start(self.collect_logs)
        if self.capacity is not None and time.monotonic() >= self._flush_at:
            self._flush_at = time.monotonic() + FLUSH_SECONDS
            self.workers.start(self.flush_touches)

    def collect_logs(self) -> None:
        """Remove event logs of bundles that are gone, and see whether the clock was set."""
        self._adjust_clock()
        with contextlib.suppress(OSError):
            notices = self.board.read()
            for shelf in self.shelves.all():
                shelf.collect_logs(notices)

    def flush_touches(self) -> None:
        """Tell other processes which bundles were used, by the files' mtimes."""
        if time.monotonic() >= self._adjust_at:
            self._adjust_clock()
        if self.capacity is not None:
            self.capacity.forget_gone()
        touched = [bundle for catalog in list(self._catalogs.values()) for bundle in catalog.take_touched()]
        # The most recent first: a victim is looked for at the other end.
        for bundle in sorted(touched, key=lambda bundle: bundle.touched, reverse=True)[:FLUSHED_BUNDLES]:
            if bundle.touched > bundle.modified:
                bundle.modified = bundle.touched
                with contextlib.suppress(OSError):
                    os.utime(bundle.path, ns=(bundle.touched, bundle.touched))

    def ignored(self) -> int:
        """Files in this storage's namespaces that are named like bundles and are none."""
        return sum(catalog.ignored for catalog in list(self._catalogs.values()))

    def hung_reads(self) -> int:
        """Reads that hang in the file system, though nobody waits for them any more."""
        return 0 if self.buffers is None else self.buffers.stuck()

    def close(self) -> None:
        """Leave no thread and no descriptor behind."""
        if self.capacity is not None:
            self.flush_touches()
        self.workers.close(CLOSE_SECONDS)
        self.descriptors.close()
        self._stamp.close()

    def _read_board(self) -> Notices:
        try:
            notices = self.descriptors.making_room(self.board.read)
        except OSError:
            # When the store comes back, files that were opened before belong to a mount that has died.
            self.descriptors.close()
            raise
        if notices.epoch != self._epoch:
            self._epoch = notices.epoch
            self.descriptors.close()
        return notices

    def _open(self, namespace: Namespace) -> Catalog:
        shelf = self.shelves.get(namespace.name)
        with self._lock:
            catalog = self._catalogs.get(namespace.name)
            if catalog is None:
                catalog = Catalog(namespace, shelf, self.descriptors, self.workers, self.clock, parallel=not self.is_local)
                self._catalogs[namespace.name] = catalog
            return catalog

    def _make_reader(self, config: FileConfig, *, threads: int, direct: bool) -> Reader:
        return Reader(
            self.descriptors,
            self.workers,
            self.buffers,
            threads=threads,
            bytes_per_thread=LOCAL_BYTES_PER_THREAD if self.is_local else NETWORK_BYTES_PER_THREAD,
            direct=direct,
            trusts_cache=self.is_local and config.hung_reads == "auto",
            verifies=config.verify_checksums,
            retires_bad_sectors=self.is_local,
        )

    def _make_capacity(self, limit_bytes: int, evicted: Callable[[Namespace, int], None]) -> Capacity:
        return Capacity(
            limit_bytes,
            self.tree,
            self.board,
            self.shelves,
            self.drafts,
            self.changes,
            self.rewriter,
            self._catalogs.get,
            evicted,
            self.clock,
        )

    def _create(self, *, syncs: bool) -> None:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"path {self.path!r} is a file; name a directory")
        try:
            self.tree.create()
            if syncs:
                sync_directory(self.tree.root)
                sync_directory(self.path)
        except OSError as error:
            raise StorageUnavailableError(f"cannot make the store's directories in {self.path!r}: {error}") from error

    def _adjust_clock(self) -> None:
        self._adjust_at = time.monotonic() + ADJUST_SECONDS
        # Where nothing can be written, nothing is evicted either.
        with contextlib.suppress(OSError):
            self.clock.adjust(self.drafts.ask_time)

    def _tidy(self) -> None:
        try:
            self._adjust_clock()
            self.drafts.collect()
            self.board.collect_forgotten(self.clock)
        except OSError as error:
            self.close()
            raise StorageUnavailableError(f"cannot list the store in {self.path!r}: {error}") from error


def _default_threads(local: bool) -> int:
    return min(LOCAL_THREADS, os.cpu_count() or 1) if local else NETWORK_THREADS
