"""Damage to the files of a store; those that are mostly holes are searched and copied as such."""

from __future__ import annotations

import os
import random

import pytest

from hicache_conformance.harness.corruption import (
    FileCorruption,
    ObjectCorruption,
    corrupt_files,
    corrupt_page,
)
from hicache_conformance.harness.store_files import PIECE_BYTES, extents, find_all
from hicache_conformance.injectors.servers import Servers

HUGE = 1 << 40
PLACES = (0, 7 << 20, HUGE - 10_000)
PAGES = [random.Random(number).randbytes(8192) for number in range(3)]


@pytest.fixture
def huge(tmp_path):
    """A terabyte with three pages in it."""
    (tmp_path / "store").mkdir()
    path = tmp_path / "store" / "slots"
    with path.open("wb") as file:
        file.truncate(HUGE)
        for place, page in zip(PLACES, PAGES, strict=True):
            file.seek(place)
            file.write(page)
    return path


def places(path, wanted):
    with path.open("rb") as file:
        return find_all(file.fileno(), wanted)


def test_pages_are_found_among_holes(huge):
    assert places(huge, [PAGES[2], b"\1" * 8192, PAGES[0]]) == [PLACES[2], -1, PLACES[0]]


def test_a_page_across_two_pieces_is_found(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (PIECE_BYTES - 5) + PAGES[0] + b"\2" * 7 + PAGES[0])
    assert places(path, PAGES[:1]) == [PIECE_BYTES - 5]


def test_a_snapshot_of_servers_has_the_same_bytes_and_holes(huge, tmp_path):
    servers, copy = Servers([]), tmp_path / "copy" / huge.name
    servers.tmp = huge.parent
    servers.snapshot(copy.parent)
    servers.close()
    assert copy.stat().st_size == HUGE
    assert copy.stat().st_blocks * 512 < 1 << 20
    assert places(copy, PAGES) == list(PLACES)
    assert copy.stat().st_mtime == huge.stat().st_mtime


@pytest.mark.parametrize("content", [b"", b"x", PAGES[0]])
def test_small_files_have_no_holes(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        assert sum(end - begin for begin, end in extents(file.fileno())) == len(content)


def test_flipped_pages_differ_in_one_bit(huge):
    assert corrupt_files(huge.parent, PAGES, FileCorruption.FLIPPED, random.Random(1)) == 3
    assert huge.stat().st_size == HUGE
    with huge.open("rb") as file:
        for place, page in zip(PLACES, PAGES, strict=True):
            found = int.from_bytes(os.pread(file.fileno(), len(page), place))
            assert (found ^ int.from_bytes(page)).bit_count() == 1


def test_other_decays(huge):
    assert corrupt_files(huge.parent, PAGES[1:], FileCorruption.TORN, random.Random(1)) == 2
    assert PLACES[1] < huge.stat().st_size < PLACES[1] + 8192
    assert corrupt_files(huge.parent, PAGES[1:], FileCorruption.EMPTIED, random.Random(1)) == 0
    assert corrupt_files(huge.parent, PAGES, FileCorruption.EMPTIED, random.Random(1)) == 1
    assert huge.stat().st_size == 0
    huge.write_bytes(PAGES[0])
    assert corrupt_files(huge.parent, PAGES, FileCorruption.GONE, random.Random(1)) == 1
    assert not huge.exists()


# A page of a foreign driver's store
# ------------------------------------------------------------------------------------------------

PAGE, OTHER = bytes(range(1, 65)), bytes(range(101, 165))


@pytest.fixture
def store(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "page").write_bytes(b"head" + PAGE + b"tail")
    (tmp_path / "other").write_bytes(b"HEAD" + OTHER + b"TAIL")
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "content"),
    [
        (ObjectCorruption.SHORT, b"head" + PAGE[:32]),
        (ObjectCorruption.LONG, b"headmore" + PAGE + b"tail"),
        (ObjectCorruption.FLIPPED_BIT, b"head" + PAGE[:32] + b"\x20" + PAGE[33:] + b"tail"),
        (ObjectCorruption.OTHER_KEY, b"HEAD" + OTHER + b"TAIL"),
        (ObjectCorruption.OTHER_IDENTITY, b"HEAD" + OTHER + b"TAIL"),
    ],
)
def test_the_file_that_has_a_page_is_damaged_in_place_and_no_other(store, damage, content):
    file = store / "deep" / "page"
    number = file.stat().st_ino
    assert corrupt_page(store, PAGE, OTHER, damage)
    assert (file.read_bytes(), file.stat().st_ino) == (content, number)
    assert (store / "other").read_bytes() == b"HEAD" + OTHER + b"TAIL"


def test_a_page_that_no_file_has_as_it_is_cannot_be_damaged(store):
    assert not corrupt_page(store, PAGE[::-1], OTHER, ObjectCorruption.SHORT)


def test_pages_that_share_a_file_cannot_change_places(store):
    (store / "other").unlink()
    (store / "deep" / "page").write_bytes(PAGE + OTHER)
    assert not corrupt_page(store, PAGE, OTHER, ObjectCorruption.OTHER_KEY)
