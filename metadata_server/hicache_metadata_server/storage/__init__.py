"""Durability: groups of changes are appended to a log, and compacted into blocks of slots.

With SQLite both are tables of one file. A group is one row of the log, written by one transaction;
a compaction writes blocks and deletes their groups in one transaction. A crash leaves all or
nothing of a transaction, and so of a group. docs/design/metadata-storage.md has the steps.
"""
