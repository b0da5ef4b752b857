"""Persistence: a write-ahead log with group commit, and its compaction into SQLite."""
