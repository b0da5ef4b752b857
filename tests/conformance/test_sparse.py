"""Files that are mostly holes are searched, damaged and copied without filling them."""

from __future__ import annotations

import os
import random

import pytest

from hicache_conformance.harness.corruption import FileCorruption, corrupt_files
from hicache_conformance.harness.store_files import PIECE_BYTES, copy_file, extents, find_all

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


def test_a_copy_has_the_same_bytes_and_holes(huge, tmp_path):
    copy = tmp_path / "copy"
    assert copy_file(str(huge), str(copy)) == str(copy)
    assert copy.stat().st_size == HUGE
    assert copy.stat().st_blocks * 512 < 1 << 20
    assert places(copy, PAGES) == list(PLACES)
    assert copy.stat().st_mtime == huge.stat().st_mtime


@pytest.mark.parametrize("content", [b"", b"x", PAGES[0]])
def test_small_files_are_copied_too(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    copy_file(str(tmp_path / "file"), str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content
    with (tmp_path / "copy").open("rb") as file:
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
