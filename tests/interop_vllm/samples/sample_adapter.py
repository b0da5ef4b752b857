"""An L2 adapter of LMCache with a fault: this project's own, and what the fault changes."""

from __future__ import annotations

from lmcache.v1.platform import create_event_notifier

from hicache_storage.engines.lmcache import HiCacheL2Adapter


class ForgetsTheEvent(HiCacheL2Adapter):
    """Finishes loads, and signals none."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self._silent = create_event_notifier()

    def get_load_event_fd(self):
        return self._silent.fileno()

    def close(self):
        super().close()
        self._silent.close()
