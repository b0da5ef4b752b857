"""The Lua scripts, as Redis gets them."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

_WITH_LIVE: Final = ("commit", "confirm")
_ALONE: Final = ("claim", "register")
"""They are about no scope."""


class Script(NamedTuple):
    """A script, and what Redis calls it."""

    source: str
    sha: str


@cache
def script(name: str) -> Script:
    """The script of that name, behind what it shares with others."""
    before = () if name in _ALONE else ("common", "live") if name in _WITH_LIVE else ("common",)
    source = "\n".join(_read(part) for part in (*before, name))
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return files("hicache_metadata_server.shared").joinpath("lua", f"{name}.lua").read_text("utf-8")
