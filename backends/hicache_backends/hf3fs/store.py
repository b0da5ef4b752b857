"""An open store: the resources between `connect` and `disconnect`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from glob import escape, glob
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.slots.engine import MAX_BUFFERED_BYTES, SlotEngine, is_damaged
from hicache_backends.hf3fs.slots.files import SUFFIX, SlotFile, SlotGeometry, refusals
from hicache_backends.hf3fs.slots.scopes import SlotScope, store_id
from hicache_backends.hf3fs.slots.usrbio import UsrbioEngine, load_library
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.directories import make_last, mount_of
from hicache_metadata_server.protocol import DeleteScope
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
        self._scopes: dict[str, SlotScope] = {}
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

    def scopes(self, namespaces: Sequence[Namespace]) -> list[SlotScope]:
        """Return the scopes of namespaces; declare the new ones to the metadata client."""
        # Every call comes here, so the lock is only taken for a new scope; none is ever removed.
        return [
            self._scopes.get(namespace.name) or self._declare(namespace) for namespace in namespaces
        ]

    def described_namespaces(self) -> list[Namespace]:
        """Return the namespaces of the slot files in the directory that are of this store."""
        return Namespace.read_all(glob(f"{escape(self.path)}/*-{self._id}.json"))

    def delete_damaged(
        self, scope: SlotScope, pages: Sequence[SlotStatus], call: Call
    ) -> tuple[int, bool]:
        """Read live pages again and delete the damaged ones.

        Returns:
            Their number, and whether the state of all pages is certain.
        """
        keys, generations, certain = list[str](), list[int](), True
        for page in pages:
            damaged = is_damaged(self.engine, scope, page, call)
            # A page that cannot be read may be whole: it is not deleted.
            certain &= damaged is not None
            if damaged:
                keys.append(page.key)
                generations.append(page.generation)
        if keys:
            # With generations: a page that was stored under the key meanwhile stays.
            going = DeleteScope(scope=scope.name, keys=keys, generations=generations)
            self.metadata.delete([going], call)
        return len(keys), certain

    def refusals(self) -> list[str]:
        """Return the reasons that can be known before a set for which it would be refused."""
        return refusals(self.path, [scope.file for scope in list(self._scopes.values())])

    def sustained(self, scope: SlotScope) -> str:
        """What sets can store for long once a file is full, for logs."""
        shape, limits = scope.file.geometry, self.metadata.about.limits
        pages, size = limits.sustained(shape.slots), limits.sustained(shape.file_bytes)
        return f"{pages:.3g} pages/s ({size / 1e6:.3g} MB/s)"

    def close(self) -> None:
        """Release all threads, sockets and descriptors."""
        try:
            self.metadata.close()
        finally:
            self.engine.close()
            for scope in list(self._scopes.values()):
                with contextlib.suppress(OSError):
                    scope.file.close()

    def _declare(self, namespace: Namespace) -> SlotScope:
        with self._lock:
            scope = self._scopes.get(namespace.name)
            if scope is None:
                scope = self._scope_of(namespace)
                self.metadata.declare(
                    scope.geometry,
                    self.config.lease_seconds,
                    scope.file.is_written,
                    namespace.identity.model,
                )
                shape = scope.file.geometry
                logger.info(
                    "hf3fs: %s has %d slots of %d bytes; full, it takes %s for long",
                    *(scope.name, shape.slots, shape.slot_bytes, self.sustained(scope)),
                )
                # Last: a scope that could not be declared is declared again by the next call.
                self._scopes[namespace.name] = scope
            return scope

    def _scope_of(self, namespace: Namespace) -> SlotScope:
        # The map is named by the store's id, and so is the file. Under a name without it, a map made
        # after the directory was emptied would give out slots of the file that the engines of the
        # former map make again.
        name = f"{namespace.pool}-{namespace.name}-{self._id}"
        file = SlotFile(
            os.path.join(self.path, name + SUFFIX),
            SlotGeometry.of(namespace, self.config.file_bytes),
            self.engine.adopt,
            namespace.describe(),
        )
        return SlotScope(f"0:{name}", namespace, file)

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
            library = load_library()
        except ImportError as error:
            raise ConfigError(f"engine 'usrbio' needs hf3fs-py-usrbio: {error}") from error
        mount_point = library.extract_mount_point(self.path)
        if mount_point is None:
            raise ConfigError(f"engine 'usrbio' needs a 3FS mount, and {self.path!r} is on none")
        return UsrbioEngine(library, mount_point, threads=threads)
