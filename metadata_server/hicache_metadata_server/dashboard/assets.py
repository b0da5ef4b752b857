"""Static files of the status page.

They contain no data, so they are served without a token; the page's scripts then call the protocol
with the token that the user enters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

PREFIX: Final = "/page/"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    # Revalidated each time: after an update of the server, a cached old page would call a new
    # protocol. The entity tag makes that cheap.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One static file."""

    body: bytes
    content_type: str
    tag: str
    """Entity tag: a digest of the content."""


def is_page(path: str) -> bool:
    """Return True for a path of the status page."""
    return path == "/" or path.startswith(PREFIX)


def read_assets() -> dict[str, Asset]:
    """Read all files, by URL path."""
    # Into memory, at the start: a request can only name a key of this table, never a path on disk.
    assets = dict[str, Asset]()
    for file in resources.files("hicache_metadata_server.dashboard").joinpath("static").iterdir():
        body, kind = file.read_bytes(), TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            assets[PREFIX + file.name] = Asset(
                body, kind, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            )
    assets["/"] = assets.pop(f"{PREFIX}index.html")
    return assets
