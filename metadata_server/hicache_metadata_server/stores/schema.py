"""The tables of a SQLite store."""

from __future__ import annotations

from typing import Final

VERSION: Final = 2
APPLICATION: Final = 0x68694D64
"""Written into the file, so that a database of something else is not taken for ours."""

# journal: what happened to slots, group by group, until it is folded into `blocks`: one row is written much faster than many.
# place: number of the scope << 40 | number of the block in it. A slot that a scope's later epoch has cleared is still here as it was.
TABLES: Final = """
CREATE TABLE scopes (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, slots INTEGER NOT NULL, slot_bytes INTEGER NOT NULL,
    geometry TEXT NOT NULL, identity TEXT NOT NULL, epoch INTEGER NOT NULL, cleared_until REAL NOT NULL
);
CREATE TABLE blocks (place INTEGER PRIMARY KEY, slots BLOB NOT NULL);
CREATE TABLE journal (number INTEGER PRIMARY KEY, slots BLOB NOT NULL);
CREATE TABLE pins (pin INTEGER PRIMARY KEY, until REAL NOT NULL, slots BLOB NOT NULL);
CREATE TABLE answers (
    once TEXT PRIMARY KEY, until REAL NOT NULL, digest BLOB NOT NULL, content_type TEXT NOT NULL, status INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX answers_by_end ON answers (until);
CREATE TABLE counters (name TEXT PRIMARY KEY, ceiling INTEGER NOT NULL);
"""
SCOPE_BITS: Final = 40
