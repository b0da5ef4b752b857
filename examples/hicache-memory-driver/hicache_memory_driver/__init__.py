"""The HiCacheStorage driver `memory`."""
