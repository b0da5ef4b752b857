"""Damage to the files of a store, which foreign drivers are judged by."""

from __future__ import annotations

import pytest

from hicache_conformance.harness.corruption import ObjectCorruption, corrupt_page

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
