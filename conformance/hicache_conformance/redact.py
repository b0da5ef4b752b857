"""Takes secrets out of what goes into reports."""

from __future__ import annotations

from hicache_storage.tools.options import HIDDEN, redacted

__all__ = ["HIDDEN", "redacted"]
