"""The open store: all parts that exist between `connect` and `disconnect`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.bundle_set import BundleSets
from hicache_backends.file.capacity import MEASURE_SECONDS, Capacity, FreeSpace
from hicache_backends.file.change_feed import ChangeFeed, FeedSnapshot
from hicache_backends.file.page_index import PageIndex
from hicache_backends.file.paths import StorePaths, random_writer
from hicache_backends.file.publisher import Publisher
from hicache_backends.file.reader import CHUNK_BYTES, Reader
from hicache_backends.file.rewriter import Rewriter
from hicache_backends.file.temp_files import ServerClock, TempFiles
from hicache_backends.file.writer import Writer
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.directories import CACHING_DAEMONS, mount_of, sync_directory
from hicache_backends.posix.files import Descriptors
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import ConfigError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.file.bundle_set import Expired
    from hicache_backends.file.config import FileConfig
    from hicache_storage.objects import Namespace
    from hicache_storage.objects.recorder import StatsRecorder

logger = logging.getLogger(__name__)

LOCAL_THREADS = min(4, os.cpu_count() or 1)
NETWORK_THREADS = 8
"""Threads that move the bytes of one call by default: on a local disk; on a network mount, and with direct_io."""

OPEN_FILES = 64
"""Files kept open between calls. An evicted bundle keeps its space until it is closed."""

BYTES_PER_THREAD = 4 << 20
"""From the page cache, a second thread gains up to 1.4x at 8 MiB a call, 1.8x at 32 MiB, and nothing
at 2 MiB. Where idle cores of a virtual machine have halted, it gains nothing at 32 MiB, and a call of
8 MiB takes up to half as long again."""

DIRECT_BYTES_PER_THREAD = 1 << 20
"""Past the page cache a local disk is kept busy by requests of several threads: with one at a time,
of 512 KiB, it waits for each."""

FLUSH_SECONDS = 5.0
"""Seconds between writes of the times of use, which decide what other processes evict."""

FLUSHED_BUNDLES = 1024
"""Limit on bundles whose times are set in one flush."""

EXPIRE_SECONDS = 1.0
"""Seconds between looks for open files that have not been used for a while."""

COLLECT_SECONDS = 300.0
"""Seconds between removals of event logs whose bundles are gone."""

ADJUST_SECONDS = 60.0
"""Seconds between requests for the file server's time."""

CLOSE_SECONDS = 5.0


class Store:
    """A store's directory, opened by one storage.

    Args:
        config: the storage's options.
        recorder: counts pages that are evicted.

    Raises:
        ConfigError: the path is no directory.
        StorageUnavailableError: the directory cannot be made, listed or written to.
    """

    def __init__(self, config: FileConfig, recorder: StatsRecorder) -> None:
        self.path = os.path.abspath(config.path)
        mount = mount_of(self.path)
        self.is_local = mount.is_local
        self.paths = StorePaths(self.path, asks_server=not mount.is_local)
        self._create(syncs=config.fsync)
        if mount.kind in CACHING_DAEMONS:
            logger.warning(
                "%s is a %s mount, which caches names for some time: until then pages of other "
                "nodes are misses, and sets may answer True for pages that others have removed; "
                "switch that cache off, or let one node use the store",
                self.path,
                mount.kind,
            )
        direct = mount.favours_direct_reads if config.direct_io is None else config.direct_io
        threads = config.threads or (
            LOCAL_THREADS if mount.is_local and not direct else NETWORK_THREADS
        )
        self.thread_pool = ThreadPool("hicache-file", threads - 1)
        self.descriptors = Descriptors(OPEN_FILES)
        self.clock = ServerClock()
        self.feed = ChangeFeed(self.paths, random_writer(), syncs=config.fsync)
        self.bundle_sets = BundleSets(self.feed)
        self.temp_files = TempFiles(self.paths, self.feed.writer, self.descriptors, self.clock)
        self.publisher = Publisher(self.feed, self.temp_files)
        self.rewriter = Rewriter(self.publisher, self.descriptors)
        self.buffers = None if mount.is_memory else Buffers(CHUNK_BYTES)
        self.reader = Reader(
            descriptors=self.descriptors,
            thread_pool=self.thread_pool,
            buffers=self.buffers,
            threads=threads,
            bytes_per_thread=DIRECT_BYTES_PER_THREAD
            if direct and mount.is_local
            else BYTES_PER_THREAD,
            direct=direct,
            on_disk=mount.is_local and not mount.is_memory,
        )
        self.writer = Writer(
            temp_files=self.temp_files,
            mount=mount,
            syncs=config.fsync,
            threads=threads,
        )
        self._page_indexes: dict[str, PageIndex] = {}
        self._lock = threading.Lock()
        self._epoch = 0
        self.capacity: Capacity | None = None
        self._closing = threading.Event()
        self._watch = threading.Thread()
        if config.capacity_bytes is not None or config.leaves_room:
            self.capacity = Capacity(
                config.capacity_bytes,
                FreeSpace(self.paths.root, config.min_free_bytes),
                self.bundle_sets,
                self.publisher,
                self._page_indexes.get,
                recorder,
            )
        self._periodic: dict[Callable[[], None], float] = {
            self.descriptors.expire: EXPIRE_SECONDS,
            self.flush_touches: FLUSH_SECONDS,
            self._adjust_clock: ADJUST_SECONDS,
            self._collect_logs: COLLECT_SECONDS,
        }
        now = time.monotonic()
        self._due = {task: now + seconds for task, seconds in self._periodic.items()}
        self._tidy()
        self._watch_room()

    def page_indexes(self, namespaces: Sequence[Namespace], expired: Expired) -> list[PageIndex]:
        """The page indexes of namespaces, with all events announced before this call.

        Pages whose indexes have not been read when the deadline passes are misses until the next
        call.

        Raises:
            OSError: the store is away.
        """
        snapshot = self._read_feed()
        page_indexes = self.known_page_indexes(namespaces)
        for page_index in page_indexes:
            page_index.catch_up(snapshot, expired)
        return page_indexes

    def cached_page_indexes(self, namespaces: Sequence[Namespace]) -> list[PageIndex] | None:
        """Answer `page_indexes` without I/O or a lock held during I/O, on a local file system.

        Returns:
            None where that is not possible.
        """
        snapshot = self.feed.read_cached()
        if snapshot is None or snapshot.epoch != self._epoch:
            return None
        known = [self._page_indexes.get(namespace.name) for namespace in namespaces]
        current = [
            page_index
            for page_index in known
            if page_index is not None and page_index.is_current(snapshot)
        ]
        return current if len(current) == len(known) else None

    def known_page_indexes(self, namespaces: Sequence[Namespace]) -> list[PageIndex]:
        """The page indexes of namespaces as they are, without a request."""
        return [
            self._page_indexes.get(namespace.name) or self._open(namespace)
            for namespace in namespaces
        ]

    def after_call(self) -> None:
        """Start periodic maintenance, in the background: a stalled disk must not delay a call."""
        self._watch_room()
        if self.feed.history.is_due():
            self.thread_pool.run_in_background(self.feed.history.flush)
        now = time.monotonic()
        for task, due in self._due.items():
            if now >= due:
                # Before it begins: where the disk stalls, one thread hangs, and not another one
                # each time.
                self._due[task] = math.inf
                if not self.thread_pool.run_in_background(partial(self._run_periodic, task)):
                    self._due[task] = now + self._periodic[task]

    def _run_periodic(self, task: Callable[[], None]) -> None:
        try:
            task()
        finally:
            self._due[task] = time.monotonic() + self._periodic[task]

    def _collect_logs(self) -> None:
        """Remove event logs and histories of bundles that are gone."""
        with contextlib.suppress(OSError):
            snapshot = self.feed.read()
            for bundle_set in self.bundle_sets.all():
                bundle_set.collect_logs(snapshot)
                self.feed.history.collect(bundle_set.namespace, self.clock)

    def flush_touches(self) -> None:
        """Publish this process's uses of bundles to other processes, as mtimes of the files."""
        touched = [
            bundle
            for page_index in list(self._page_indexes.values())
            for bundle in page_index.take_touched()
        ]
        # The most recent first: a victim is looked for at the other end.
        for bundle in sorted(touched, key=lambda bundle: bundle.touched, reverse=True)[
            :FLUSHED_BUNDLES
        ]:
            if bundle.touched > bundle.modified:
                bundle.modified = bundle.touched
                with contextlib.suppress(OSError):
                    os.utime(bundle.path, ns=(bundle.touched, bundle.touched))

    def refusals(self) -> list[str]:
        """The reasons why sets are refused that can be known without one."""
        paths = self.paths
        try:
            status = os.statvfs(paths.root)
        except FileNotFoundError:
            return []  # The store was deleted: the next set makes it again.
        # Some file systems have no fixed numbers, and report 0.
        free = status.f_bavail if os.geteuid() else status.f_bfree
        full = (status.f_blocks and not free) or (status.f_files and not status.f_favail)
        no_room = "" if self.capacity is None else self.capacity.refusal()
        reasons = {
            "the file system is mounted read-only": status.f_flag & os.ST_RDONLY,
            f"{paths.root} is not writable for this user": not all(
                os.access(place, os.W_OK)
                for place in (paths.root, paths.temporaries, paths.writers)
            ),
            # Else a set evicts, as long as there are pages.
            "the file system is full": full and (self.capacity is None or no_room),
            no_room: no_room,
            "bundles cannot be moved to their places": not self.publisher.moves,
        }
        return [reason for reason, applies in reasons.items() if applies]

    def ignored(self) -> int:
        """Number of files with the name of a bundle and other content."""
        return sum(page_index.ignored for page_index in list(self._page_indexes.values()))

    def close(self) -> None:
        """Stop all threads and close all files."""
        self._closing.set()
        self.flush_touches()
        self.feed.history.flush()
        until = time.monotonic() + CLOSE_SECONDS
        self.thread_pool.close(until - time.monotonic())
        if self._watch.is_alive():
            self._watch.join(max(0.0, until - time.monotonic()))
        self.descriptors.close()
        self.feed.counter.close()

    def _watch_room(self) -> None:
        """Start the thread that leaves others their room, unless it runs.

        An engine that makes no calls keeps its pages, and others may fill the disk meanwhile. A
        forked child starts without the thread.
        """
        if self.capacity is None or self._watch.is_alive():
            return
        with self._lock:
            if not self._watch.is_alive() and not self._closing.is_set():
                self._watch = threading.Thread(
                    target=_keep_free,
                    args=(weakref.ref(self.capacity), self._closing),
                    name="hicache-file-room",
                    daemon=True,
                )
                # The process may have no more threads: the next call tries again.
                with contextlib.suppress(RuntimeError):
                    self._watch.start()

    def _read_feed(self) -> FeedSnapshot:
        try:
            snapshot = self.feed.read()
        except OSError:
            # When the store comes back, files that were opened before belong to a mount that has
            # died. Or their descriptors are what is missing.
            self.descriptors.close()
            raise
        if snapshot.epoch != self._epoch:
            self._epoch = snapshot.epoch
            self.descriptors.close()
        return snapshot

    def _open(self, namespace: Namespace) -> PageIndex:
        bundle_set = self.bundle_sets.get(namespace.name)
        with self._lock:
            page_index = self._page_indexes.get(namespace.name)
            if page_index is None:
                page_index = PageIndex(
                    namespace,
                    bundle_set,
                    self.descriptors,
                    self.thread_pool,
                    self.clock,
                    parallel=not self.is_local,
                )
                self._page_indexes[namespace.name] = page_index
            return page_index

    def _create(self, *, syncs: bool) -> None:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"path {self.path!r} is a file; name a directory")
        try:
            self.paths.create()
            if syncs:
                sync_directory(self.paths.root)
                sync_directory(self.path)
        except OSError as error:
            raise StorageUnavailableError(
                f"cannot make the store's directories in {self.path!r}: {error}"
            ) from error

    def _adjust_clock(self) -> None:
        # Where nothing can be written, nothing is evicted either.
        with contextlib.suppress(OSError):
            self.clock.adjust(self.temp_files.ask_time)

    def _tidy(self) -> None:
        try:
            self._adjust_clock()
            self.temp_files.collect()
            self.feed.retire_idle_cursors(self.clock)
        except OSError as error:
            self.close()
            raise StorageUnavailableError(
                f"cannot list the store in {self.path!r}: {error}"
            ) from error


def _keep_free(capacity: weakref.ref[Capacity], closing: threading.Event) -> None:
    """Leave others their room until a store is closed, or dropped without being closed."""
    while not closing.wait(MEASURE_SECONDS):
        if (kept := capacity()) is None:
            return
        try:
            kept.keep_free()
        except OSError as error:
            logger.debug("cannot make room for others: %s", error)
        del kept
