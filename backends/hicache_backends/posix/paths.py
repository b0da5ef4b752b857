"""Paths of stores: what may be given, and what may be made."""

from __future__ import annotations

import contextlib
import os


def check_path(path: str) -> None:
    """Refuse a path that no shell has expanded.

    Raises:
        ValueError: it begins with `~`.
    """
    if path.startswith("~"):
        raise ValueError(f"path {path!r} begins with '~', which only a shell expands; write the whole path")


def make_last(path: str) -> None:
    """Make a directory in one that exists.

    Raises:
        FileNotFoundError: there is none: it may be on a file system that is not mounted.
        OSError: it cannot be made.
    """
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        raise FileNotFoundError(f"there is no directory {above!r}: mount what belongs there, or make it")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
