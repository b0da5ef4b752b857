"""Formats: file names are parsed exactly, and damage of a bundle's index is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_backends.file.bundle import (
    BundleFormat,
    BundleId,
    BundleIndex,
    BundleName,
    Claim,
    NotABundleError,
    parse_bundle,
    tail_checksum,
)
from hicache_backends.file.events import (
    MAX_CURSOR_BYTES,
    SHORT_CURSOR_BYTES,
    Added,
    Found,
    Removed,
    Unlisted,
    WriterCursor,
    parse_cursor,
)
from hicache_backends.file.paths import (
    MAX_CREATED_US,
    MAX_FILE_BYTES,
    NAMESPACE_NAME,
    ProcessId,
    random_writer,
)
from hicache_backends.file.temp_files import TemporaryName, parse_temporary

NUMBERS = st.integers(0, 2**63)
SIZES, MOMENTS = st.integers(0, MAX_FILE_BYTES), st.integers(0, MAX_CREATED_US)
WRITERS = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=10, max_size=10)
NAMESPACE = "0123456789abcdef" * 2


PROCESSES = st.builds(ProcessId, WRITERS.map(lambda text: text[:8]), NUMBERS, NUMBERS)
CLAIMS = st.builds(Claim, PROCESSES, st.builds(BundleId, WRITERS, NUMBERS))


@given(
    st.builds(BundleName, WRITERS, NUMBERS, SIZES, MOMENTS, NUMBERS, st.none() | CLAIMS),
    st.builds(TemporaryName, PROCESSES, WRITERS, NUMBERS, SIZES),
)
def test_names_are_read_back(bundle, temporary):
    assert parse_bundle(str(bundle)) == bundle
    assert parse_temporary(str(temporary)) == temporary


EVENTS = st.one_of(
    st.tuples(SIZES, MOMENTS, NUMBERS),
    st.builds(Removed, st.builds(BundleId, WRITERS, NUMBERS)),
    st.builds(Found, st.builds(BundleName, WRITERS, NUMBERS, SIZES, MOMENTS, NUMBERS)),
    st.just(Unlisted()),
)
"""Those of a writer that has announced nothing else; a tuple is what it has added."""


@given(WRITERS, st.lists(st.lists(EVENTS, max_size=5), max_size=8), st.booleans())
def test_a_cursor_holds_the_last_events(writer, batches, short):
    cursor, told = WriterCursor(NAMESPACE, writer, 0, ()), []
    for batch in batches:
        events = []
        for offset, event in enumerate(batch):
            number = len(told) + offset + 1
            events.append(
                Added(BundleName(writer, number, *event)) if isinstance(event, tuple) else event
            )
        told += events
        cursor = cursor.after(events, 0xABCDEF, short=short)
        assert len(str(cursor)) <= (SHORT_CURSOR_BYTES if short else MAX_CURSOR_BYTES)
    again = parse_cursor(str(cursor))
    assert again == cursor
    for seen in range(len(told) + 1):
        missed = again.since(seen)
        assert missed is None or missed == told[seen:]
    assert again.since(len(told)) == []
    if told:
        assert again.since(len(told) - 1) == told[-1:]


def test_no_name_is_longer_than_encrypting_file_systems_take():
    process, most = ProcessId("z" * 8, 2**22, 2**64 - 1), 2**64 - 1
    claim = Claim(process, BundleId("b" * 10, most))
    bundle = BundleName("a" * 10, most, MAX_FILE_BYTES, MAX_CREATED_US, 2**32 - 1, claim)
    temporary = TemporaryName(process, "a" * 10, most, MAX_FILE_BYTES)
    assert max(len(str(bundle)), len(str(temporary))) <= SHORT_CURSOR_BYTES


@pytest.mark.parametrize(
    "change", ["x{}", "{}x", "{}.bak", "{} ", ".{}", "{}\n", " {}", "{}.tmp", "A{}"]
)
def test_names_that_look_alike_are_strangers(change):
    writer = random_writer()
    bundle = str(BundleName(writer, 1, 2, 3, 4))
    temporary = str(TemporaryName(ProcessId("abcdefgh", 1, 2), writer, 3, 4))
    assert parse_bundle(change.format(bundle)) is None
    assert parse_temporary(change.format(temporary)) is None
    assert not NAMESPACE_NAME.fullmatch(change.format(NAMESPACE))


def test_one_bundle_has_one_spelling():
    writer = random_writer()
    assert parse_bundle(f"{writer}-1-2-3-a.bundle") == BundleName(writer, 1, 2, 3, 10)
    for rest in ("01-2-3-a", "1-2-3-A", "1-+2-3-a", "1-2-3"):
        text = f"{writer}-{rest}.bundle"
        assert parse_bundle(text) is None


@pytest.mark.parametrize(
    "text",
    [
        f"{NAMESPACE}.aaaaaaaaaa.1.a1-2-3,a1-2-3",  # more events than there were
        f"{NAMESPACE}.aaaaaaaaaa.1.A1-2-3",
        f"{NAMESPACE}.aaaaaaaaaa.",
    ],
)
def test_an_impossible_cursor_is_ignored(text):
    assert parse_cursor(text) is None


@pytest.mark.parametrize("events", ["b1-2-3", "a1-2", "rshort-1", "a1-2-3-4", ",a1-2-3"])
def test_events_that_make_no_sense_make_the_reader_list(events):
    cursor = parse_cursor(f"{NAMESPACE}.aaaaaaaaaa.9.1.{events}")
    assert cursor is None or Unlisted() in cursor.since(9 - len(cursor.events))


KEYS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
    min_size=1,
    max_size=12,
)
FORMAT = BundleFormat(7, b"0123456789abcdef")


def bundle(keys: list[str]) -> tuple[bytes, BundleIndex]:
    index = BundleIndex(tuple(keys), bytes(number % 251 for number in range(64 * len(keys))))
    return b"p" * (FORMAT.page_bytes * len(keys)) + FORMAT.tail(index), index


def read(data: bytes, shape: BundleFormat = FORMAT, size: int | None = None) -> BundleIndex:
    length = shape.tail_bytes(data, len(data) if size is None else size, tail_checksum(data))
    return shape.parse(data[-length:])


@given(KEYS, st.data())
def test_an_index_is_read_back_or_its_damage_is_noticed(keys, data):
    whole, index = bundle(keys)
    assert read(whole) == index
    assert len(whole) == FORMAT.bundle_bytes(keys)
    damaged = bytearray(whole)
    position = data.draw(st.integers(FORMAT.page_bytes * len(keys), len(whole) - 1))
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    longer = whole + data.draw(st.binary(min_size=1, max_size=100))
    for other, size in ((bytes(damaged), None), (cut, len(whole)), (longer, None)):
        with pytest.raises(NotABundleError):
            read(other, size=size)
    with pytest.raises(NotABundleError, match="does not fit"):
        read(whole, size=len(whole) + 1)


@pytest.mark.parametrize(
    "shape", [BundleFormat(8, FORMAT.fingerprint), BundleFormat(7, b"another namespac")]
)
def test_a_bundle_of_another_namespace_is_none_of_ours(shape):
    data, _ = bundle(["a", "b"])
    with pytest.raises(NotABundleError):
        read(data, shape)
