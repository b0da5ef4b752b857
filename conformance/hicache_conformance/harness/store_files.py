"""Files of a store, and their disk usage."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def store_files(config: Mapping[str, object], home: Path) -> dict[str, int]:
    """Lengths of the files under the directories that options name, by their paths below `home`.

    Empty where none names a directory there, so that the store is somewhere else.
    """
    named = {
        value for value in config.values() if isinstance(value, str) and value.startswith(str(home))
    }
    found = dict[str, int]()
    for directory in named:
        for parent, _, names in os.walk(directory):
            for name in names:
                path = Path(parent, name)
                # One may be removed while we look. The length and not the blocks: a driver limits
                # what it writes, and file systems round.
                with suppress(FileNotFoundError):
                    found[os.path.relpath(path, home)] = path.lstat().st_size
    return found


def disk_usage(config: Mapping[str, object], home: Path) -> int:
    """Bytes of all these files."""
    return sum(store_files(config, home).values())
