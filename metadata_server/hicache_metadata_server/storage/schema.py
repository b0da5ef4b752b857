"""The tables of a SQLite store."""

from __future__ import annotations

from typing import Final

VERSION: Final = 7
"""Version of the tables. Since 7 a prefix that is the key of the slot before is not written."""
OLDEST: Final = 6
"""Oldest version that is read. Earlier ones had their changes in files of their own."""
APPLICATION: Final = 0x68694D64
"""Application id in the file, by which databases of other programs are refused."""

# The groups in `log` are not in the other tables yet. place: number of the scope << 40 | number of
# the block in it. A clear does not change the slots here: slots of an earlier epoch are read as
# quarantined.
TABLES: Final = """
CREATE TABLE log (id INTEGER PRIMARY KEY, payload BLOB NOT NULL);
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
SCOPE_BITS: Final = 40
BLOCK_MASK: Final = (1 << SCOPE_BITS) - 1
"""Bits of a place that are the number of the block."""
INODE: Final = "inode"
"""Counter that holds the inode of the file, by which a copy is told from its original."""
CLOSED_UNTIL: Final = "closed_until"
"""Counter that holds the time before which no slot of a copy is given."""
