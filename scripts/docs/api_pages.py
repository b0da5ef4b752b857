"""Pages of the SDK's public modules, which mkdocstrings fills from the sources."""

from __future__ import annotations

from typing import Final

MODULES: Final = {
    "hicache_storage": "hicache_storage",
    "spec": "hicache_storage.spec",
    "objects": "hicache_storage.objects",
    "layers": "hicache_storage.layers",
    "pools": "hicache_storage.pools",
    "hookspecs": "hicache_storage.hookspecs",
    "transfer": "hicache_storage.transfer",
    "testing": "hicache_storage.testing",
    "hybrid": "hicache_storage.hybrid",
    "conformance": "hicache_conformance",
}
"""The modules, by the names of their pages."""


def api_pages() -> dict[str, str]:
    """Markdown of each page, by its path."""
    return {f"api/{name}.md": f"# `{module}`\n\n::: {module}\n" for name, module in MODULES.items()}
