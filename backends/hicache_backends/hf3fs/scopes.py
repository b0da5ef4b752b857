"""How this driver's namespaces and keys are called in the metadata server."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_backends.hf3fs.slots.geometry import SlotGeometry
from hicache_metadata_server.protocol import ScopeGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.slots.files import SlotFile, SlotFiles
    from hicache_storage.objects import Namespace

ID_NAME: Final = "store.id"
ESCAPE: Final = "~"


@dataclass(frozen=True, slots=True)
class ScopeOfSlots:
    """A namespace's scope and its file."""

    name: str
    """`0:pool-fingerprint-store`. Rank 0 because the fingerprint tells ranks apart that hold different bytes, and only those."""
    namespace: Namespace
    file: SlotFile

    @classmethod
    def of(cls, namespace: Namespace, files: SlotFiles, store_id: str, file_bytes: int) -> ScopeOfSlots:
        """The scope of a namespace.

        Raises:
            ValueError: not one page fits into the file.
        """
        geometry, name = SlotGeometry.of(namespace, file_bytes), f"{namespace.pool}-{namespace.name}"
        file = files.get(name, geometry, namespace.describe())
        return cls(f"0:{name}-{store_id}", namespace, file)

    @property
    def geometry(self) -> ScopeGeometry:
        """What all clients must agree on."""
        shape, page = self.file.geometry, self.namespace.geometry
        described = {"layout": page.layout, "dtype": page.dtype, "page_size": page.page_size, "bytes": page.component_bytes}
        return ScopeGeometry(
            scope=self.name,
            slots=shape.slots,
            slot_bytes=shape.slot_bytes,
            geometry=hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:32],
            identity=self.namespace.name,
        )


def store_id(directory: str) -> str:
    """What tells this directory from any other that the same server knows; given once, to the first who asks.

    A symbolic link, because that is made with its text or not at all.

    Raises:
        OSError: the directory cannot be read or written.
    """
    link = os.path.join(directory, ID_NAME)
    try:
        return os.readlink(link)
    except FileNotFoundError:
        pass
    with contextlib.suppress(FileExistsError):
        os.symlink(secrets.token_hex(4), link)
    return os.readlink(link)


def metadata_key(key: str) -> str:
    """A key as servers take it: not empty, and distinct from all others'."""
    return metadata_keys([key])[0]


def metadata_keys(keys: Sequence[str]) -> list[str]:
    """All of a batch."""
    return [key if key and key[0] != ESCAPE else _escaped(key) for key in keys]


def _escaped(key: str) -> str:
    return ESCAPE + hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
