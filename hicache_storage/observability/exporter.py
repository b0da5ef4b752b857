"""HTTP endpoint for metrics, inside an engine whose own one cannot be extended.

Needs `hicache-storage[metrics]`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.spec import HiCacheStorage

logger = logging.getLogger(__name__)


class Exporter:
    """An HTTP server for `http://HOST:PORT/metrics`, in a thread of its own, until it is closed.

    A port that cannot be bound is logged as an error, and nothing is served: an engine must not end
    for its metrics.

    Args:
        storage: the storage whose `get_stats()` is exported.
        host: address to listen at.
        port: TCP port; 0 takes a free one.
        labels: constant labels of all series, such as `{"tp_rank": "0"}`.
    """

    def __init__(
        self, storage: HiCacheStorage, host: str, port: int, labels: Mapping[str, str]
    ) -> None:
        # Engines without a metrics port do not wait for it.
        from prometheus_client import CollectorRegistry, start_http_server

        from hicache_storage.observability.prometheus import StorageCollector

        self._pid = os.getpid()
        registry = CollectorRegistry()
        registry.register(StorageCollector(storage, labels))
        self.port = 0
        """The TCP port it listens at; 0 if it does not listen."""
        try:
            server, thread = start_http_server(port, host, registry)
        # `OverflowError`: a port above 65535.
        except (OSError, OverflowError) as error:
            logger.error("no metrics at %s:%d: %s; choose another metrics_port", host, port, error)
        else:
            self._server = server
            self._thread = thread
            self.port = server.server_port

    def close(self) -> None:
        """Stop listening, and end the thread. Idempotent.

        In a forked child, which has no such thread, only the child's socket is closed: the parent
        goes on listening.
        """
        if not self.port:
            return
        self.port = 0
        if self._pid != os.getpid():
            self._server.server_close()
            return
        # In this order: the thread polls the socket until `shutdown` returns.
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
