"""The HiCacheStorage driver `object`."""
