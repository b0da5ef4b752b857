"""What of a config has to be the same on every rank that serves a request together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_storage.hybrid.stack.config import StackConfig
    from hicache_storage.spec import HiCacheStorage

SAME_FIELDS: Final[tuple[str, ...]] = (
    "the kind of stack", "page_size", "checkpoint_grid", "device_tokens", "device_states", "host_tokens", "host_states",
    "layout", "write_policy", "prefetch", "bigram", "kv_replicated", "storage",
)  # fmt: skip
"""As a message names them; as many for every config, so that any two ranks can be compared."""


def same_on_all(config: StackConfig, storage: HiCacheStorage | None) -> dict[str, object]:
    """What is compared, by `SAME_FIELDS`.

    Host pools whose size is memory have as many slots as fit on every rank. All other slots are numbers that an engine's
    tables have been made for: they are not made fewer behind its back.
    """
    values: dict[str, object] = {name: getattr(config, name, None) for name in SAME_FIELDS}
    values["the kind of stack"] = type(config).__name__
    values["kv_replicated"] = config.identity("any").kv_replicated
    values["storage"] = _stored(config, storage)
    values |= {name: "memory" for name in ("host_tokens", "host_states") if isinstance(values[name], str)}
    return values


def _stored(config: StackConfig, storage: HiCacheStorage | None) -> object:
    """Whose bytes the storage keeps, and whether there is one: attaching it is a collective."""
    named = config.storage if storage is None else storage.identity
    return named and (named.model, named.revision, named.tenant, named.adapter, named.salt)
