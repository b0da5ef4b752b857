"""Addresses of metadata servers, as given in options."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse one address, several separated by commas, or a list.

    Raises:
        ValueError: no address, or one that is malformed or repeated; the message names it.
    """
    urls = tuple(
        url.strip().rstrip("/") for url in (given.split(",") if isinstance(given, str) else given)
    )
    if not urls:
        raise ValueError("an empty list names no server")
    for url in urls:
        # Before any other message, which would print the password.
        if "@" in url:
            raise ValueError(
                f"{url.rpartition('@')[2]!r} is given with a user; servers take tokens"
            )
        if not _is_address(url):
            raise ValueError(f"{url!r} is no http or https address")
        if urls.count(url) > 1:
            raise ValueError(f"{url!r} is named twice")
    return urls


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # `urlsplit` checks the port only when it is read.
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
