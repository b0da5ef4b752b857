"""Threads for the transfers of calls over TCP."""

from __future__ import annotations

from typing import Final

MAX_HELPERS: Final = 8
"""Threads of one storage, for all calls together. If all are busy or hung, a call runs in its
caller alone."""
MAX_THREADS: Final = 4
"""Threads for one call, including its caller: while some prepare, verify or copy, the transfers of
others keep the library's connections busy."""
