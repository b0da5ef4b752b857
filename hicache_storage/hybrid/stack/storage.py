"""Making a stack's storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.plugins import create_storage
from hicache_storage.spec import ConfigError, HiCacheStorage

if TYPE_CHECKING:
    from hicache_storage.hybrid.stack.config import StackConfig, StorageConfig


def storage_for(config: StackConfig, storage: HiCacheStorage | StorageConfig) -> HiCacheStorage:
    """A storage of a stack's bytes: made from its description, or the caller's own after a look at its identity.

    Raises:
        ConfigError: it is of another page size or layout, or takes KV for replicated where it is not.
        DriverError: as `create_storage` raises it.
    """
    if isinstance(storage, HiCacheStorage):
        _check(config, storage)
        return storage
    identity = config.identity(
        storage.model, kv_dtype=storage.kv_dtype, revision=storage.revision, tenant=storage.tenant,
        adapter=storage.adapter, salt=storage.salt,
    )  # fmt: skip
    return create_storage(storage.driver, identity, storage.options, options=storage.layers)


def _check(config: StackConfig, storage: HiCacheStorage) -> None:
    wanted = config.identity("any")
    for name in ("page_size", "layout", "kv_replicated"):
        found, ours = getattr(storage.identity, name), getattr(wanted, name)
        if found != ours:
            raise ConfigError(
                f"the storage's identity has {name}={found!r}, the stack {ours!r}; create the storage with config.identity()"
            )
