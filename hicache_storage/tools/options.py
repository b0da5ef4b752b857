"""Options of a driver as `key=value` texts.

Secrets and directories are found in them.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicache_storage.hookspecs import DriverSpec

TMP: Final = "{tmp}"
"""Placeholder of an empty directory in `DriverSpec.trial_config`."""
UNIQUE: Final = "{unique}"
"""Placeholder of a name that no other store has, such as a prefix of keys."""
HIDDEN: Final = "***"

_SECRET: Final = re.compile(
    r"pass(word|wd|phrase)?|secret|token|credential|auth|api_?key|access_?key|private",
    re.IGNORECASE,
)
_USERINFO: Final = re.compile(r"(?<=//)[^/@\s]+@")
_PLACE: Final = re.compile(r"(?:^|_)(?:path|dir|directory|folder|root)$")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Parse options given as `key=value`.

    Raises:
        ValueError: a text has another form.
    """
    options = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"-c {text!r} is not of the form key=value")
        options[name] = value
    return options


def redacted(options: Mapping[str, object]) -> dict[str, str]:
    """Format options as text, sorted by name; secrets, and users in addresses, are redacted."""
    return {
        name: HIDDEN if _SECRET.search(name) else without_user(str(options[name]))
        for name in sorted(options)
    }


def without_user(text: str) -> str:
    """Redact user and password of addresses in a text."""
    return _USERINFO.sub(f"{HIDDEN}@", text)


def directories(options: Mapping[str, object]) -> dict[str, Path]:
    """Find the directories in options.

    By a name such as `path` or `cache_dir`, or an absolute path that is no file.
    """
    found = dict[str, Path]()
    for name, value in options.items():
        # A URL in an option such as `store_path` names no directory of this machine.
        if isinstance(value, (str, Path)) and str(value) and not _URL.match(str(value)):
            path = Path(value)
            if (_PLACE.search(name) or path.is_absolute()) and not path.is_file():
                found[name] = path
    return found


def nearest_directory(path: Path) -> Path:
    """Return a directory, or its nearest existing parent."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def trial_options(spec: DriverSpec, directory: Path | str) -> dict[str, str] | None:
    """Return options of a throwaway store in an empty directory.

    None if the driver needs servers for one.
    """
    if any("{port:" in value for value in spec.trial_config.values()):
        return None
    unique = secrets.token_hex(8)
    return {
        name: value.replace(TMP, str(directory)).replace(UNIQUE, unique)
        for name, value in spec.trial_config.items()
    }


def size_text(count: int | None) -> str:
    """Format a number of bytes with a binary unit; None is no limit."""
    if count is None:
        return "no limit"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
