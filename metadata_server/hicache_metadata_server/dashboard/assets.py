"""The files of the page, as they are served: the same for everybody, without any data, and so
without a token."""

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
    # Asked for anew each time, so that no page is left of the server before; the tag makes that
    # cheap.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file."""

    body: bytes
    content_type: str
    tag: str
    """Of its content, for `If-None-Match`."""


def is_page(path: str) -> bool:
    """Whether it is the page's own, and not the protocol's."""
    return path == "/" or path.startswith(PREFIX)


def read_assets() -> dict[str, Asset]:
    """Every file, by its path; whatever else is asked for is not there."""
    assets = dict[str, Asset]()
    for file in resources.files("hicache_metadata_server.dashboard").joinpath("static").iterdir():
        body, kind = file.read_bytes(), TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            assets[PREFIX + file.name] = Asset(
                body, kind, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            )
    assets["/"] = assets.pop(f"{PREFIX}index.html")
    return assets
