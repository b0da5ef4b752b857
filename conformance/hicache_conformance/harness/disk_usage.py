"""Disk usage of a store, where it is a directory that the suite has given it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Files and bytes under the directories that the options name."""

    files: int
    bytes: int

    @classmethod
    def of(cls, config: Mapping[str, object], home: Path) -> Self | None:
        """Look now.

        None where no option names a directory under `home`, so that the store is somewhere else.
        """
        named = {
            Path(value)
            for value in config.values()
            if isinstance(value, str) and value.startswith(str(home))
        }
        if not named:
            return None
        sizes = [size for directory in named for size in _sizes(directory)]
        return cls(len(sizes), sum(sizes))


def _sizes(directory: Path) -> list[int]:
    found = list[int]()
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                # The length and not the blocks: a driver limits what it writes, and file systems
                # round.
                found.append(os.lstat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                # Removed while we look.
                continue
    return found
