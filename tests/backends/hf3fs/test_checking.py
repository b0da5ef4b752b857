"""The page that a slot holds, compared with the page that the map lists for it."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from hicache_backends.hf3fs.slots.checking import DEFECTS, CheckedFile, ExpectedPage, SlotVerdict
from hicache_metadata_server.protocol import SlotState
from hicache_storage.objects import Call
from tests.backends.hf3fs.harness import Rig

A, B, ESCAPED = "a", "b", "~tilde"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A slot file with three pages, and what the map says of them."""
    rig = Rig(tmp_path_factory.mktemp("slots"), file_size="1MiB")
    with closing(rig.storage):
        assert all(rig.put([A, B, ESCAPED]))
        found = rig.store.metadata.inspect(rig.scope.name, [0, 1, 2], Call(5))
        assert {status.state for status in found} == {SlotState.LIVE}
        pages = [ExpectedPage(one.slot, one.key, one.length, one.checksum) for one in found]
        path = rig.scope.file.path
        with open(path, "rb") as file:
            yield rig.scope, pages, file.read(), rig.page_bytes


@pytest.fixture
def checked(stored, tmp_path):
    """The same pages in a file that can be damaged."""
    scope, pages, content, page_bytes = stored
    file = tmp_path / "copy.slots"
    file.write_bytes(content)
    fingerprint = bytes.fromhex(scope.namespace.name)
    with closing(CheckedFile(str(file), scope.geometry, fingerprint)) as one:
        yield file, one, pages, page_bytes


def test_whole_pages_are_no_defects(checked):
    """One key has to be escaped by the driver."""
    _, one, pages, _ = checked
    assert [one.verdict(page) for page in pages] == [SlotVerdict.WHOLE] * 3
    assert not {SlotVerdict.WHOLE, SlotVerdict.UNKNOWN, SlotVerdict.UNREADABLE} & DEFECTS


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"length": 0, "checksum": 0}, SlotVerdict.UNKNOWN),
        ({"length": 64}, SlotVerdict.LENGTH),
        ({"length": 10**6}, SlotVerdict.LENGTH),
        ({"checksum": 1}, SlotVerdict.OTHER),
        ({"key": B}, SlotVerdict.OTHER),
        ({"slot": 1}, SlotVerdict.OTHER),
    ],
)
def test_what_the_map_says_is_compared_with_the_slot(checked, changed, verdict):
    _, one, pages, _ = checked
    assert one.verdict(pages[0]._replace(**changed)) is verdict


@pytest.mark.parametrize("at", [0, 500, -1])
def test_a_flipped_bit_of_a_page(checked, at):
    file, one, pages, page_bytes = checked
    flip(file, at % page_bytes)
    assert one.verdict(pages[0]) is SlotVerdict.DAMAGED
    assert one.verdict(pages[1]) is SlotVerdict.WHOLE


# Of the envelope: magic number, length, fingerprint, key, checksum. The generation proves nothing.
@pytest.mark.parametrize(
    ("at", "verdict"),
    [*((at, SlotVerdict.OTHER) for at in (0, 8, 16, 32, 56)), (48, SlotVerdict.WHOLE)],
)
def test_a_flipped_bit_of_an_envelope(checked, at, verdict):
    file, one, pages, page_bytes = checked
    flip(file, page_bytes + at)
    assert one.verdict(pages[0]) is verdict


def test_a_file_that_is_short_gone_or_unreadable(checked):
    file, one, pages, _ = checked
    os.truncate(file, 100)
    assert one.verdict(pages[1]) is SlotVerdict.SHORT
    one.close()
    file.unlink()
    assert one.verdict(pages[0]) is SlotVerdict.MISSING
    file.mkdir()
    assert one.verdict(pages[0]) is SlotVerdict.UNREADABLE


def flip(file, at):
    with file.open("r+b") as some:
        some.seek(at)
        [byte] = some.read(1)
        some.seek(at)
        some.write(bytes([byte ^ 1]))
