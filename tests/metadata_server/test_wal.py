"""The write-ahead log: replay of whole, torn, damaged and missing files."""

from __future__ import annotations

import os
import random

import pytest

from hicache_metadata_server.storage import wal
from hicache_metadata_server.storage.wal import MAGIC, WriteAheadLog


def filled(tmp_path, groups=6, **options):
    own = WriteAheadLog(str(tmp_path / "m.db"), 7, synchronous=False, **options)
    for group in range(1, groups + 1):
        own.append(group, payload(group))
    own.close()
    return own


def payload(group):
    return b"%d" % group * 50


def groups(tmp_path, after=0):
    return list(WriteAheadLog(str(tmp_path / "m.db"), 7, synchronous=False).groups(after))


def files(tmp_path):
    return sorted(tmp_path.glob("m.db.log-*"))


@pytest.fixture(params=[1 << 20, 120], ids=["one file", "many files"], autouse=True)
def segments(request, monkeypatch):
    monkeypatch.setattr(wal, "SEGMENT_BYTES", request.param)


def test_what_was_appended_is_there(tmp_path):
    filled(tmp_path)
    assert groups(tmp_path) == [(group, payload(group)) for group in range(1, 7)]
    assert [group for group, _ in groups(tmp_path, 4)] == [5, 6]
    assert groups(tmp_path, 6) == []


def test_wherever_it_is_cut_the_groups_before_are_there(tmp_path):
    filled(tmp_path)
    whole = groups(tmp_path)
    last = files(tmp_path)[-1]
    content, kept = last.read_bytes(), set()
    for size in range(len(content) - 1, -1, -1):
        os.truncate(last, size)
        found = groups(tmp_path)
        assert found == whole[: len(found)]
        kept.add(len(found))
    assert max(kept) == 5
    assert kept == set(range(min(kept), 6)), "one after the other is lost"


def test_a_flipped_bit_ends_it(tmp_path):
    filled(tmp_path)
    whole, chance = groups(tmp_path), random.Random(7)
    for file in files(tmp_path):
        content = file.read_bytes()
        for _ in range(40):
            place = chance.randrange(len(MAGIC) + 8, len(content))
            damaged = bytearray(content)
            damaged[place] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            found = groups(tmp_path)
            assert len(found) < 6
            assert found == whole[: len(found)], "nothing behind the damage counts"
        file.write_bytes(content)


def test_a_file_that_is_lost_ends_it(tmp_path, segments):
    filled(tmp_path)
    first, *others = files(tmp_path)
    if not others:
        return
    others[0].unlink()
    assert groups(tmp_path) == list(
        WriteAheadLog(str(tmp_path / "m.db"), 7, synchronous=False).groups(0)
    )
    assert len(groups(tmp_path)) < 6
    first.unlink()
    assert groups(tmp_path) == [], "what follows something that is neither compacted nor there"


def test_what_is_compacted_may_be_lost(tmp_path):
    filled(tmp_path)
    own = WriteAheadLog(str(tmp_path / "m.db"), 7, synchronous=False)
    own.delete_through(4)
    assert [group for group, _ in groups(tmp_path, 4)] == [5, 6]


def test_no_file_goes_that_has_a_later_group(tmp_path):
    own = filled(tmp_path)
    for compacted in range(6):
        own.delete_through(compacted)
        assert [group for group, _ in groups(tmp_path, compacted)] == list(range(compacted + 1, 7))


def test_other_files_are_left_alone(tmp_path):
    for name in ("m.db.log-1", "m.db.log-zzzzzzzzzzzzzzzz", "n.db.log-0000000000000001"):
        (tmp_path / name).write_bytes(b"mine")
    filled(tmp_path)
    WriteAheadLog(str(tmp_path / "m.db"), 7, synchronous=False).delete_all()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / "m.db.log-0000000000000001").write_bytes(b"something else altogether")
    with pytest.raises(ValueError, match="is no log"):
        groups(tmp_path)


def test_the_log_of_another_database_is_refused(tmp_path):
    filled(tmp_path)
    with pytest.raises(ValueError, match="is the log of another database"):
        list(WriteAheadLog(str(tmp_path / "m.db"), 8, synchronous=False).groups(0))


def test_an_append_that_fails_is_not_there(tmp_path, monkeypatch):
    own = WriteAheadLog(str(tmp_path / "m.db"), 7, synchronous=True)
    own.append(1, payload(1))

    def fails(_):
        raise OSError(5, "Input/output error")

    for broken in (("fdatasync",), ("fdatasync", "ftruncate")):
        with monkeypatch.context() as disk:
            for name in broken:
                disk.setattr(wal.os, name, fails if name == "fdatasync" else lambda *_: fails(0))
            with pytest.raises(OSError, match="Input/output"):
                own.append(2, b"lost")
    own.append(4, payload(4))
    own.close()
    found = groups(tmp_path)
    assert (found[0], found[-1]) == ((1, payload(1)), (4, payload(4)))
    assert own._segments[0].first_group == 1
