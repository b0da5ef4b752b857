"""Names of objects in Mooncake, which has one flat set of them."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Namespace, ObjectRead, ObjectWrite

LONGEST: Final = 128
"""Characters of a key that stands in its object's name as it is."""


def object_name(namespace: Namespace, key: str) -> str:
    """Letters, digits, `-` and `_`, distinct for distinct keys; all names of a namespace begin with `prefix_of` it."""
    # A digest, which stands for any other key, never begins with "_".
    return f"{namespace.name}-_{key}" if _is_plain([key]) else namespace.object_name(key)


def object_names(namespace: Namespace, keys: Sequence[str]) -> list[str]:
    """Names of many keys. Digests of plain ones, which engines make, would take longer than the master's answer about them."""
    if not _is_plain(keys):
        return [object_name(namespace, key) for key in keys]
    prefix = f"{namespace.name}-_"
    return [prefix + key for key in keys]


def names_of(objects: Sequence[ObjectRead | ObjectWrite]) -> list[str]:
    """Names of the objects of reads or writes, in their order."""
    names = list[str]()
    for namespace, some in groupby(objects, attrgetter("namespace")):
        names += object_names(namespace, [one.key for one in some])
    return names


def prefix_of(namespace_name: str) -> str:
    """What the names of a namespace's objects begin with, and those of no other."""
    return f"{namespace_name}-"


def _is_plain(keys: Sequence[str]) -> bool:
    """Whether all of them are letters and digits of ASCII, and neither empty nor long."""
    lengths = set(map(len, keys))
    return 0 not in lengths and max(lengths, default=0) <= LONGEST and (not keys or "".join(keys).encode().isalnum())
