"""Metrics of a storage inside an engine whose own `/metrics` has no place for them. Needs `hicache-storage[metrics]`."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

from hicache_storage.spec import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.spec import HiCacheStorage

logger = logging.getLogger(__name__)


def see_that_it_can_export() -> None:
    """Look for the package before anything is opened.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        importlib.import_module("prometheus_client")
    except ImportError as error:
        raise ConfigError(f"metrics_port needs one more package: pip install 'hicache-storage[metrics]' ({error})") from error


class Exporter:
    """Answers Prometheus at `http://HOST:PORT/metrics` from a thread of its own, until it is closed.

    A port that cannot be had is logged, and nobody is answered: an engine does not end for its metrics.

    Args:
        storage: whose `get_stats()` is told.
        host: address to listen at.
        port: 0 takes a free one.
        labels: constant labels of all series, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, storage: HiCacheStorage, host: str, port: int, labels: Mapping[str, str]) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        from hicache_storage.layers.prometheus import StorageCollector

        self._pid = os.getpid()
        registry = CollectorRegistry()
        registry.register(StorageCollector(storage, labels))
        self.port = 0
        """Where it listens; 0 if it does not."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            logger.error("no metrics at %s:%d: %s; choose another metrics_port", host, port, error)
        else:
            self.port = self._server.server_port

    def close(self) -> None:
        """Listen no more, and end the thread. Idempotent; in a forked child, which has no such thread, the parent listens on."""
        if not self.port:
            return
        self.port = 0
        if self._pid != os.getpid():
            self._server.server_close()
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
