"""The HiCacheStorage driver `redis`."""
