"""Where the driver's files lie.

```
<path>/hicache-file-1/
    stamp/                        empty; its mtime is a random number, new after every change of the store
    writers/                      one empty file a writer and namespace, whose name tells its last events; and one whose name
                                  tells this store from one that was deleted and made again
    retired/                      markers of writers that have long said nothing, and whose bundles are still there
    temporary/                    what is being written
    <namespace>/namespace.json    whose pages these are, for people
    <namespace>/bundles/          the pages; a bundle that is just being replaced has a name that ends in .claimed
    <namespace>/events/           the event logs of its writers, a cache (`events.py`)
```
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hicache_backends.file.names import is_namespace, random_birth
from hicache_backends.posix.paths import make_last

if TYPE_CHECKING:
    from hicache_backends.file.names import BundleName, TemporaryName
    from hicache_storage.objects import Namespace

FORMAT = "hicache-file-1"
"""The layout's version is a directory, so that two versions can share a path without seeing each other."""


class Tree:
    """Paths below a store's directory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.root = str(Path(path) / FORMAT)
        self.stamp = f"{self.root}/stamp"
        self.writers = f"{self.root}/writers"
        self.retired = f"{self.root}/retired"
        self.temporaries = f"{self.root}/temporary"

    def create(self) -> None:
        """Make the directories that are missing; anyone may come first."""
        fresh = not os.path.exists(self.writers)
        make_last(self._path)
        for path in (self.writers, self.temporaries, self.stamp):
            os.makedirs(path, exist_ok=True)
        if fresh:
            self.mark_birth()

    def mark_birth(self) -> None:
        """Give the store a mark of its own. Several that are made at a time are as good as one."""
        os.close(os.open(f"{self.writers}/{random_birth()}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def bundles(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/bundles"

    def bundle(self, namespace: str, name: BundleName) -> str:
        return f"{self.root}/{namespace}/bundles/{name}"

    def events(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/events"

    def temporary(self, name: TemporaryName) -> str:
        return f"{self.temporaries}/{name}"

    def namespaces(self) -> list[str]:
        """The namespaces that anyone has written to."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self.root) if is_namespace(name)]
        return []

    def create_namespace(self, namespace: str) -> None:
        """Make a namespace's directories."""
        os.makedirs(self.bundles(namespace), exist_ok=True)

    def describe_namespace(self, namespace: Namespace, draft: TemporaryName) -> None:
        """Tell people whose pages a namespace holds. Whoever comes later writes the same."""
        path = f"{self.root}/{namespace.name}/namespace.json"
        if os.path.exists(path):
            return
        # Whoever can write here must not be able to point it elsewhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.temporary(draft), flags, 0o666), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(namespace.describe()), indent=2) + b"\n")
        os.rename(self.temporary(draft), path)


def sync_directory(path: str) -> None:
    """Make the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
