"""Static files of the status page.

They contain no data, so they are served without a token; the page's scripts then call the protocol
with the token that the user enters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope

PREFIX: Final = "/page"
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


def is_page(path: str) -> bool:
    """Return True for a path of the status page."""
    return path == "/" or path.startswith(f"{PREFIX}/")


class Assets(StaticFiles):
    """The files below `PREFIX`, with `HEADERS`."""

    def __init__(self) -> None:
        super().__init__(packages=[("hicache_metadata_server.dashboard", "static")])

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response

    async def index(self, request: Request) -> Response:
        """The page at `/`."""
        return await self.get_response("index.html", request.scope)
