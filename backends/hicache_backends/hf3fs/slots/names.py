"""Names of stores and keys in the metadata server."""

from __future__ import annotations

import errno
import os
import re
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ID_NAME: Final = "store.id"
ESCAPE: Final = "~"


def store_id(directory: str) -> str:
    """Read the store id of a directory; draw it if there is none.

    It tells this directory from all others of a server. It is the name of a directory inside a
    directory, which is renamed into place: that needs neither links nor locks.

    Raises:
        OSError: the directory cannot be read or written.
    """
    path, drawn = os.path.join(directory, ID_NAME), secrets.token_hex(4)
    if not os.path.lexists(path):
        own = f"{path}.{drawn}"
        os.makedirs(os.path.join(own, drawn))
        try:
            os.rename(own, path)
        except OSError:
            os.rmdir(os.path.join(own, drawn))
            os.rmdir(own)
            # Another process may have been first: a directory that is not empty is not replaced.
            if not os.path.lexists(path):
                raise
    # Of several processes that draw an id, the first one's is the directory's.
    found = "".join(os.listdir(path))
    # It becomes a part of file names.
    if not re.fullmatch("[0-9a-f]{8}", found):
        raise OSError(errno.EINVAL, f"{path} has no id of a store")
    return found


def metadata_keys(keys: Sequence[str]) -> list[str]:
    """Convert keys to a server's keys: not empty, and distinct for distinct keys."""
    # Mostly none is converted, which one search of the joined text finds out.
    if all(keys) and ESCAPE not in "".join(keys):
        return list(keys)
    return [key if key and key[0] != ESCAPE else ESCAPE + key for key in keys]


def page_key(key: str) -> str:
    """Convert a server's key back."""
    return key.removeprefix(ESCAPE)
