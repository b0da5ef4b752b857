"""An open store: the resources between `connect` and `disconnect`."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from glob import escape, glob
from typing import TYPE_CHECKING, Any, Final

from hicache_backends.hf3fs.slots.engine import MAX_BUFFERED_BYTES, SlotEngine, is_damaged
from hicache_backends.hf3fs.slots.files import SlotFile
from hicache_backends.hf3fs.slots.names import metadata_keys, store_id
from hicache_backends.hf3fs.slots.usrbio import UsrbioEngine
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.directories import make_last, mount_of
from hicache_metadata_server.protocol import DeleteScope, SlotState
from hicache_storage.objects import Call, Namespace, this_process
from hicache_storage.spec import ConfigError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext

    from hicache_backends.hf3fs.config import Hf3fsConfig
    from hicache_metadata_server.client.http_client import HttpMetadataClient
    from hicache_metadata_server.protocol import SlotStatus

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 5.0
"""Time limit of requests to the metadata server that have no deadline of a call, as those of open."""
LOCAL_THREADS: Final = 4
NETWORK_THREADS: Final = 8


class Store:
    """One directory and its metadata client, opened by one storage.

    Args:
        config: the driver's.
        count_failover: called for each metadata server that is left for another one; in a thread of
            the client.

    Raises:
        ConfigError: the path is not a directory.
        StorageUnavailableError: the directory cannot be used, or the metadata server does not
            answer.
    """

    def __init__(self, config: Hf3fsConfig, count_failover: Callable[[], None]) -> None:
        self.config = config
        self.path = os.path.abspath(config.path)
        self._create()
        self._files: dict[str, SlotFile] = {}
        self._lock = threading.Lock()
        self.metadata = self._open_metadata(count_failover)
        self.metadata.owner = this_process()
        try:
            # First: without a server no rings and no shared memory are needed.
            self.metadata.refresh(Call(TIMEOUT_SECONDS))
            self.engine = self._open_engine()
        except BaseException:
            self.metadata.close()
            raise

    def files(self, namespaces: Sequence[Namespace]) -> list[SlotFile]:
        """Return the files of namespaces; declare new scopes to the metadata client."""
        # Every call comes here, so the lock is only taken for a new file; none is ever removed.
        return [
            self._files.get(namespace.name) or self._declare(namespace) for namespace in namespaces
        ]

    def described_namespaces(self) -> list[Namespace]:
        """Return the namespaces of the slot files in the directory that are of this store."""
        return Namespace.read_all(glob(f"{escape(self.path)}/*-{self._id}.json"))

    def live_pages(self, file: SlotFile, keys: Sequence[str], call: Call) -> list[SlotStatus]:
        """Return the pages of keys that are there, without counting a use of them."""
        pages = self.metadata.inspect(file.scope, call, keys=metadata_keys(keys))
        return [page for page in pages if page.state is SlotState.LIVE]

    def delete(self, file: SlotFile, pages: Sequence[SlotStatus], call: Call) -> None:
        """Delete pages. One that was stored under a key meanwhile stays: its generation differs."""
        if pages:
            keys = [page.key for page in pages]
            generations = [page.generation for page in pages]
            going = DeleteScope(scope=file.scope, keys=keys, generations=generations)
            self.metadata.delete([going], call)

    def delete_damaged(
        self, file: SlotFile, pages: Sequence[SlotStatus], call: Call
    ) -> tuple[int, bool]:
        """Read live pages again and delete the damaged ones.

        Returns:
            Their number, and whether the state of all pages is certain.
        """
        verdicts = [is_damaged(self.engine, file, page, call) for page in pages]
        # A page that cannot be read may be whole: it is not deleted.
        damaged = [page for page, verdict in zip(pages, verdicts, strict=True) if verdict]
        self.delete(file, damaged, call)
        return len(damaged), None not in verdicts

    def refusals(self) -> list[str]:
        """Return the reasons that can be known before a set for which it would be refused."""
        status = os.statvfs(self.path)
        paths = [file.path for file in list(self._files.values()) if os.path.exists(file.path)]
        sparse = not paths or any(
            os.stat(path).st_blocks * 512 < os.stat(path).st_size for path in paths
        )
        reasons = {
            "the file system is mounted read-only": status.f_flag & os.ST_RDONLY,
            f"{self.path} is not writable for this user": not all(
                os.access(path, os.W_OK) for path in paths or [self.path]
            ),
            # Some file systems have no fixed number, and report 0.
            "the file system is full": status.f_blocks and not status.f_bavail and sparse,
        }
        return [reason for reason, applies in reasons.items() if applies]

    def sustained(self, file: SlotFile) -> str:
        """What sets can store for long once a file is full, for logs."""
        limits = self.metadata.about.limits
        pages, size = limits.sustained(file.slots), limits.sustained(file.file_bytes)
        return f"{pages:.3g} pages/s ({size / 1e6:.3g} MB/s)"

    def close(self) -> None:
        """Release all threads, sockets and descriptors."""
        try:
            self.metadata.close()
        finally:
            self.engine.close()
            for file in list(self._files.values()):
                file.close()

    def _declare(self, namespace: Namespace) -> SlotFile:
        config = self.config
        with self._lock:
            file = self._files.get(namespace.name)
            if file is None:
                file = SlotFile(
                    self.path, self._id, namespace, config.file_bytes, self.engine.adopt
                )
                self.metadata.declare(
                    file.geometry, config.lease_seconds, file.is_written, namespace.identity.model
                )
                logger.info(
                    "hf3fs: %s has %d slots of %d bytes; full, it takes %s for long",
                    *(file.scope, file.slots, file.slot_bytes, self.sustained(file)),
                )
                # Last: a scope that could not be declared is declared again by the next call.
                self._files[namespace.name] = file
            return file

    def _create(self) -> None:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"path {self.path!r} is a file; name a directory")
        try:
            make_last(self.path)
            # Drawn before the server is asked, which may not be there.
            self._id = store_id(self.path)
        except OSError as error:
            raise StorageUnavailableError(
                f"cannot use the directory {self.path!r}: {error}"
            ) from error

    def _open_metadata(self, count_failover: Callable[[], None]) -> HttpMetadataClient:
        from hicache_metadata_server.client.http_client import HttpMetadataClient

        config = self.config
        return HttpMetadataClient(
            config.metadata_urls,
            config.bearer,
            timeout_seconds=TIMEOUT_SECONDS,
            tls=self._tls(),
            on_failover=count_failover,
        )

    def _tls(self) -> SSLContext | None:
        config = self.config
        if not config.is_secure:
            return None
        from hicache_metadata_server.client.http_transport import client_context

        try:
            return client_context(
                ca=config.metadata_ca,
                certificate=config.metadata_certificate,
                key=config.metadata_key,
            )
        except ValueError as error:
            raise ConfigError(
                f"metadata_ca, metadata_certificate or metadata_key: {error}"
            ) from error

    def _open_engine(self) -> SlotEngine:
        is_local = mount_of(self.path).is_local
        usual = min(LOCAL_THREADS, os.cpu_count() or 1) if is_local else NETWORK_THREADS
        threads = self.config.threads or usual
        if self.config.engine == "usrbio":
            return self._open_usrbio(threads)
        buffers = None if is_local else Buffers(MAX_BUFFERED_BYTES)
        return SlotEngine(threads=threads, buffers=buffers)

    def _open_usrbio(self, threads: int) -> SlotEngine:
        try:
            library: Any = importlib.import_module("hf3fs_fuse.io")
        except ImportError as error:
            raise ConfigError(f"engine 'usrbio' needs hf3fs-py-usrbio: {error}") from error
        mount_point = library.extract_mount_point(self.path)
        if mount_point is None:
            raise ConfigError(f"engine 'usrbio' needs a 3FS mount, and {self.path!r} is on none")
        return UsrbioEngine(library, mount_point, threads=threads)
