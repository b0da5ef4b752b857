"""Disk usage of a store, where it is a directory that the suite has given it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def disk_usage(config: Mapping[str, object], home: Path) -> int:
    """Bytes of the files under the directories that options name.

    0 where none names a directory under `home`, so that the store is somewhere else.
    """
    named = {
        value for value in config.values() if isinstance(value, str) and value.startswith(str(home))
    }
    taken = 0
    for directory in named:
        for parent, _, names in os.walk(directory):
            for name in names:
                # One may be removed while we look. The length and not the blocks: a driver limits
                # what it writes, and file systems round.
                with suppress(FileNotFoundError):
                    taken += Path(parent, name).lstat().st_size
    return taken
