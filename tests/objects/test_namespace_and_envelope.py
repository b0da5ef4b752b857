"""Names and envelopes: stable, and exact about what they accept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.objects.namespace import (
    ENVELOPE_BYTES,
    Namespace,
    belongs,
    checksum,
    key_digest,
    seal,
    stored_checksum,
)
from hicache_storage.spec import PageGeometry, PoolName
from tests.support.forking import in_child

GEOMETRY = PageGeometry("page_first", "bfloat16", 64, 640, (4096, 4096))


def namespace(kit, pool="kv", geometry=GEOMETRY, **identity):
    return Namespace(kit.identity(**identity), PoolName(pool), geometry)


def test_the_name_is_stable_across_releases(kit):
    """A change here empties every store of every user."""
    assert namespace(kit).name == "9d6773f780e91ef191bda1857f202168"
    assert (
        namespace(kit).object_name("k")
        == "9d6773f780e91ef191bda1857f202168-1cbe47e4faf300c4555f7cccf152b3c53a473b68"
    )


def test_the_size_of_the_pool_does_not_matter(kit):
    larger = PageGeometry("page_first", "bfloat16", 64, 64_000, (4096, 4096))
    assert namespace(kit, geometry=larger).name == namespace(kit).name


def test_the_envelope_is_what_the_spec_says(kit):
    place = namespace(kit)
    envelope = seal(place.envelope_prefix, "k", 0x1122334455667788)
    assert len(envelope) == ENVELOPE_BYTES
    assert envelope[:8] == b"HCP2\1\0\0\0"
    assert int.from_bytes(envelope[8:16], "little") == 8192
    assert envelope[16:32] == place.fingerprint
    assert envelope[32:48] == key_digest("k")
    assert envelope[56:] == bytes.fromhex("8877665544332211")
    assert stored_checksum(envelope) == 0x1122334455667788
    assert seal(place.envelope_prefix, "k", 0)[48:56] != envelope[48:56]


@given(position=st.integers(0, 47), flip=st.integers(1, 255))
def test_any_other_prefix_does_not_belong(position, flip):
    prefix = bytes(range(32))
    envelope = bytearray(seal(prefix, "k", 7))
    assert belongs(envelope, prefix, key_digest("k"))
    envelope[position] ^= flip
    assert not belongs(envelope, prefix, key_digest("k"))


@pytest.mark.parametrize("length", [0, 63, 65])
def test_an_envelope_of_another_length_does_not_belong(length):
    prefix = bytes(32)
    assert not belongs((seal(prefix, "k", 7) * 2)[:length], prefix, key_digest("k"))


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_the_checksum_does_not_depend_on_the_cut(pieces):
    whole = b"".join(pieces)
    assert checksum([memoryview(piece) for piece in pieces]) == checksum([memoryview(whole)])


def test_forked_children_draw_generations_of_their_own():
    def sealed():
        return seal(bytes(32), "key", 0).hex()

    assert len({in_child(sealed), in_child(sealed), sealed()}) == 3
