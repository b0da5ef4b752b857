"""Names of objects: distinct, independent of the batch, with their namespace's prefix."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_backends.mooncake.names import (
    MAX_PLAIN_LENGTH,
    names_of,
    object_name,
    object_names,
    prefix_of,
)
from hicache_storage.objects import Namespace, ObjectRead
from hicache_storage.spec import PageGeometry, PoolName
from tests.backends.file.harness import identity

SPACE, OTHER = (
    Namespace(identity(), PoolName(pool), PageGeometry("page_first", "b", 4, 16, (60,)))
    for pool in ("kv", "swa")
)
PLAIN = st.text(st.sampled_from("09azAZ"), min_size=1, max_size=MAX_PLAIN_LENGTH)
KEYS = PLAIN | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40
)


@given(keys=st.lists(KEYS, max_size=6))
def test_names(keys):
    names = object_names(SPACE, keys)
    assert names == [object_name(SPACE, key) for key in keys]
    assert len(set(names)) == len(set(keys))
    assert all(
        re.fullmatch(f"{prefix_of(SPACE.name)}[0-9A-Za-z_]+", name, re.ASCII) for name in names
    )


@pytest.mark.parametrize(
    "key", ["", "a" * (MAX_PLAIN_LENGTH + 1), "a-b", "a b", "é", "٣", "_a", "a\n"]
)
def test_keys_whose_characters_a_name_must_not_have(key):
    assert object_name(SPACE, key) == SPACE.object_name(key)
    # Which is the name of no other key.
    digest = SPACE.object_name(key).removeprefix(f"{SPACE.name}-")
    assert object_name(SPACE, digest) != SPACE.object_name(key)


def test_keys_of_engines_stand_in_the_name():
    key = hashlib.sha256(b"page").hexdigest()
    assert object_name(SPACE, key) == f"{SPACE.name}-_{key}"


def test_objects_of_several_namespaces():
    asked = [(SPACE, "a"), (SPACE, "b b"), (OTHER, "a"), (SPACE, "c")]
    assert names_of([ObjectRead(space, key, []) for space, key in asked]) == [
        object_name(*each) for each in asked
    ]
    assert names_of([]) == object_names(SPACE, []) == []
