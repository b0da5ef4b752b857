"""The format of bundles: damaged bytes are detected, and others read as they were written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_backends.file.bundle import (
    BundleFormat,
    BundleIndex,
    NotABundleError,
    tail_checksum,
)

KEYS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
    min_size=1,
    max_size=12,
)
FORMAT = BundleFormat(7, b"0123456789abcdef")


def bundle(keys: list[str]) -> tuple[bytes, BundleIndex]:
    index = BundleIndex(tuple(keys), bytes(number % 251 for number in range(64 * len(keys))))
    return b"p" * (FORMAT.page_bytes * len(keys)) + FORMAT.tail(index), index


def read(
    data: bytes, shape: BundleFormat = FORMAT, size: int | None = None, checksum: int | None = None
) -> BundleIndex:
    checksum = tail_checksum(data) if checksum is None else checksum
    length = shape.tail_bytes(data, len(data) if size is None else size, checksum)
    return shape.parse(data[-length:])


@given(KEYS)
def test_an_index_is_read_back(keys):
    data, index = bundle(keys)
    assert read(data) == index
    assert len(data) == FORMAT.bundle_bytes(keys)


@given(KEYS, st.data())
def test_a_flipped_bit_in_the_tail_is_noticed(keys, data):
    whole, _index = bundle(keys)
    start = FORMAT.page_bytes * len(keys)
    position = data.draw(st.integers(start, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(NotABundleError):
        read(bytes(damaged))


@given(KEYS, st.data())
def test_a_cut_or_lengthened_file_is_noticed(keys, data):
    whole, _ = bundle(keys)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(NotABundleError):
        read(cut, size=len(whole))
    longer = whole + data.draw(st.binary(min_size=1, max_size=100))
    with pytest.raises(NotABundleError):
        read(longer)
    with pytest.raises(NotABundleError, match="does not fit"):
        read(whole, size=len(whole) + 1)


@pytest.mark.parametrize(
    "shape", [BundleFormat(8, FORMAT.fingerprint), BundleFormat(7, b"another namespac")]
)
def test_a_bundle_of_another_namespace_is_none_of_ours(shape):
    data, _ = bundle(["a", "b"])
    with pytest.raises(NotABundleError):
        read(data, shape)
