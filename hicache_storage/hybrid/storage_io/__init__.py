"""Prefetches and backups: the storage as worker threads call it."""
