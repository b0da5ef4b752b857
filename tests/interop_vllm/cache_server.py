"""LMCache's own server, a process of its own, with this project's adapter as its L2."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Self

from hicache_conformance.harness.ports import accepts, free_ports
from tests.interop.server_process import ServerProcess

if TYPE_CHECKING:
    from pathlib import Path


class CacheServer(ServerProcess):
    """`lmcache server`, until the block ends; then it is killed.

    Args:
        place: directory for its log.
        driver: of the pages.
        options: of the driver.
        adapter: further keys of the adapter, which LMCache reads itself.
    """

    def __init__(
        self, place: Path, driver: str, options: dict[str, object], **adapter: object
    ) -> None:
        [self._rpc_port, self.port] = free_ports(2)
        self.log = place / f"lmcache-{len(list(place.glob('lmcache-*')))}.log"
        entry = {
            "type": "plugin",
            "module_path": "hicache_storage.engines.lmcache",
            "class_name": "HiCacheL2Adapter",
            "adapter_params": {"driver": driver, "driver_config": options},
            **adapter,
        }
        self.argv = [
            *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"),
            *("--host", "127.0.0.1", "--port", str(self._rpc_port), "--http-port", str(self.port)),
            *("--chunk-size", "64", "--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
            *("--max-workers", "2", "--supported-transfer-mode", "engine_driven"),
            *("--l2-adapter", json.dumps(entry)),
        ]
        self.environment = {**os.environ, "PYTHONHASHSEED": "0"}

    def __enter__(self) -> Self:
        super().__enter__()
        self.wait_for(lambda: accepts(self.port), "LMCache's server does not start")
        return self

    def connector(self) -> tuple[str, str]:
        """Return vLLM's arguments of a connector to this server."""
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._rpc_port,
            },
        }
        return "--kv-transfer-config", json.dumps(transfer)
