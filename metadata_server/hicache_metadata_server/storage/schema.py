"""The tables of a SQLite store."""

from __future__ import annotations

from typing import Final

VERSION: Final = 5
OLDEST: Final = 3
"""Oldest version that is upgraded when it is opened; earlier ones are refused."""
APPLICATION: Final = 0x68694D64
"""Application id in the file, by which databases of other programs are refused."""

# The tables have all groups of the log up to the counter `folded`; later changes are in the log
# only. place: number of the scope << 40 | number of the block in it. A clear does not change the
# slots here: slots of an earlier epoch are read as quarantined.
TABLES: Final = """
CREATE TABLE scopes (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, slots INTEGER NOT NULL, slot_bytes INTEGER NOT NULL,
    geometry TEXT NOT NULL, identity TEXT NOT NULL, epoch INTEGER NOT NULL, cleared_until REAL NOT NULL,
    tenant TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT ''
);
CREATE TABLE blocks (place INTEGER PRIMARY KEY, slots BLOB NOT NULL);
CREATE TABLE pins (pin INTEGER PRIMARY KEY, until REAL NOT NULL, slots BLOB NOT NULL);
CREATE TABLE answers (
    once TEXT PRIMARY KEY, until REAL NOT NULL, digest BLOB NOT NULL, content_type TEXT NOT NULL, status INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX answers_by_end ON answers (until);
CREATE TABLE counters (name TEXT PRIMARY KEY, ceiling INTEGER NOT NULL);
"""
CHANGES: Final = {
    3: "ALTER TABLE scopes ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
    4: "ALTER TABLE scopes ADD COLUMN model TEXT NOT NULL DEFAULT ''",
}
"""Upgrade from a version to the next one."""
SCOPE_BITS: Final = 40
BLOCK_MASK: Final = (1 << SCOPE_BITS) - 1
"""Bits of a place that are the number of the block."""
LINEAGE: Final = "lineage"
"""Counter that holds a random number, which is also in the head of each log file."""
COMPACTED: Final = "folded"
"""Counter with the last group of the log that is compacted; its name is part of the schema."""
