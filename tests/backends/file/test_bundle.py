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
