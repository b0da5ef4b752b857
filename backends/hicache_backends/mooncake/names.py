"""Names of objects in Mooncake's flat namespace."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Namespace, ObjectRead, ObjectWrite

MAX_PLAIN_LENGTH: Final = 128
"""Maximum length of a key that is part of its object's name. Longer keys are hashed."""


def object_name(namespace: Namespace, key: str) -> str:
    """Return the name of a key's object: letters, digits, `-` and `_`, after `prefix_of`."""
    # The name of a hashed key has no "_" there, so the two kinds of names cannot collide.
    return f"{namespace.name}-_{key}" if _is_plain([key]) else namespace.object_name(key)


def object_names(namespace: Namespace, keys: Sequence[str]) -> list[str]:
    """Return the names of many keys.

    Plain keys, as engines make them, are not hashed, for speed.
    """
    if not _is_plain(keys):
        return [object_name(namespace, key) for key in keys]
    prefix = f"{namespace.name}-_"
    return [prefix + key for key in keys]


def names_of(objects: Sequence[ObjectRead | ObjectWrite]) -> list[str]:
    """Return the names of the objects of reads or writes, in their order."""
    names = list[str]()
    for namespace, some in groupby(objects, attrgetter("namespace")):
        names += object_names(namespace, [one.key for one in some])
    return names


def prefix_of(namespace_name: str) -> str:
    """Return the prefix that a namespace's object names have, and no others."""
    return f"{namespace_name}-"


def _is_plain(keys: Sequence[str]) -> bool:
    """True if all keys consist of ASCII letters and digits, and none is empty or long."""
    lengths = set(map(len, keys))
    return (
        0 not in lengths
        and max(lengths, default=0) <= MAX_PLAIN_LENGTH
        and (not keys or "".join(keys).encode().isalnum())
    )
