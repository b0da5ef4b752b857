"""Pages of the SDK's public modules, which mkdocstrings fills from the sources."""

from __future__ import annotations

from typing import Final

MODULES: Final = {
    "hicache_storage": ("hicache_storage", "What most programs import."),
    "spec": ("hicache_storage.spec", "The contract: types, policies, identity, errors, and the abstract storage."),
    "objects": ("hicache_storage.objects", "`ObjectStorage`, of which a driver implements three methods, and what those are handed."),
    "layers": ("hicache_storage.layers", "What stands around every driver: deadline, circuit breaker, metrics; and faults, for tests."),
    "pools": ("hicache_storage.pools", "Host and device pools, and how a storage reaches the pages of any host pool."),
    "hookspecs": ("hicache_storage.hookspecs", "The one hook that a driver package implements."),
    "transfer": ("hicache_storage.transfer", "Copies between device and host, ordered by events."),
    "hybrid": ("hicache_storage.hybrid", "What stands above a storage: controller, radix cache, and all of it from one config."),
    "conformance": ("hicache_conformance", "The suite in a package's own tests."),
}
"""Module and what it is for, by the name of its page."""


def api_pages() -> dict[str, str]:
    """Markdown of each page, by its path."""
    return {f"api/{name}.md": f"# `{module}`\n\n{purpose}\n\n::: {module}\n" for name, (module, purpose) in MODULES.items()}
