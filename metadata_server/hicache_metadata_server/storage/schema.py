"""The tables of a SQLite store."""

from __future__ import annotations

from typing import Final

VERSION: Final = 5
OLDEST: Final = 3
"""Earlier ones are refused; this one and those after it are brought up to date when they are
opened."""
APPLICATION: Final = 0x68694D64
"""Written into the file, so that a database of something else is not taken for ours."""

# All of it is behind the log beside the file, which has what happened since: groups up to the
# counter `folded` are here. place: number of the scope << 40 | number of the block in it. A slot
# that a scope's later epoch has cleared is still here as it was.
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
"""What makes a schema of that number the next one."""
SCOPE_BITS: Final = 40
BLOCK_MASK: Final = (1 << SCOPE_BITS) - 1
"""Of a place, the number of the block."""
LINEAGE: Final = "lineage"
"""The counter that is a random number: logs of this database have it, too."""
COMPACTED: Final = "folded"
"""The counter that says up to which group of the log everything is in the tables."""
