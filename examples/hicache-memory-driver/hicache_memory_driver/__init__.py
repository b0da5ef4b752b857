"""A HiCacheStorage driver that keeps pages in the memory of its process."""
