"""Options of a driver as `key=value` texts, and the secrets in them."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

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
