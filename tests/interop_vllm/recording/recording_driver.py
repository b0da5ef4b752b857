"""A driver around another one, which records a digest of each page that is stored or delivered.

Engines load it as any other: `history.py` beside it makes it count as installed, and reads the logs.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.file import plugin as file_plugin
from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.layers import StorageLayer
from hicache_storage.plugins import config_model, driver_class, registry
from hicache_storage.pools.access import PageAccess
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import DriverConfig, parse_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import PoolTransfer, StorageIdentity


class RecordingConfig(DriverConfig):
    inner: str
    """Name of the driver."""
    options: dict[str, object]
    """Of that driver."""
    log: str
    """Directory that each process has a file in."""


class RecordingStorage(StorageLayer):
    """Records the calls of an engine, as the engine sees them."""

    def __init__(self, identity: StorageIdentity, config: RecordingConfig) -> None:
        spec = registry().get(config.inner)
        options = parse_config(config_model(spec), config.options)
        super().__init__(driver_class(spec)(identity, options))
        self._accesses = dict[str, PageAccess]()
        self._log = os.path.join(config.log, f"{os.getpid()}.jsonl")
        self._lock = threading.Lock()

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._accesses[str(host_pool_name)] = page_access(host_pool)

    def batch_get_v2(self, transfers, extra_info=None):
        answers = super().batch_get_v2(transfers, extra_info)
        ended = time.monotonic_ns()
        for transfer in transfers:
            delivered = [
                digest if answer else None
                for digest, answer in zip(
                    self._digests(transfer), answers[transfer.name], strict=True
                )
            ]
            self._note("get", transfer, delivered, ended=ended)
        return answers

    def batch_set_v2(self, transfers, extra_info=None):
        # Before the call, which no engine changes a page during.
        for transfer in transfers:
            self._note("set", transfer, self._digests(transfer), begun=time.monotonic_ns())
        return super().batch_set_v2(transfers, extra_info)

    def _digests(self, transfer: PoolTransfer) -> list[str]:
        access = self._accesses[str(transfer.name)]
        first = transfer.host_indices[:: access.geometry.page_size].tolist()
        return [
            hashlib.blake2b(b"".join(page), digest_size=16).hexdigest()
            for page in access.sources(first)
        ]

    def _note(
        self, call: str, transfer: PoolTransfer, digests: list[str | None], **at: int
    ) -> None:
        namespace = self.identity.fingerprint(str(transfer.name)).hex()
        page = {"namespace": namespace, "keys": list(transfer.keys), "digests": digests}
        line = {"call": call, **page, **at}
        with self._lock, open(self._log, "a") as log:
            log.write(json.dumps(line) + "\n")


@hookimpl
def hicache_register_drivers() -> Sequence[DriverSpec]:
    [inner] = file_plugin.hicache_register_drivers()
    return [
        DriverSpec(
            name="recording",
            target=f"{__name__}:RecordingStorage",
            config=f"{__name__}:RecordingConfig",
            # Those of the driver within are what counts; these are for lists of drivers.
            capabilities=inner.capabilities,
        )
    ]
