"""Durability: a write-ahead log with group commit, and its compaction into SQLite.

A crash before the append leaves nothing of a group; after it the whole group, which the next start
replays. A crash during a compaction or a checkpoint loses nothing, because a log file is deleted
only after a checkpoint has synced everything that was compacted from it.
docs/design/metadata-storage.md has the steps, and what survives which crash at each of them.
"""
