"""Cross-site requests: those that a browser sends for pages of other sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import JSON, Clear, encode

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext

FOREIGN: Final = (
    {"Origin": "https://site.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "site.example"},
    {"Host": "site.example", "Origin": "http://site.example", "Sec-Fetch-Site": "same-origin"},
)
FORMS: Final = ("text/plain", "application/x-www-form-urlencoded")


class BrowserCases:
    """No page of another site gives orders."""

    @covers("MD-AUTH-3", needs=[Need.NATIVE])
    def test_pages_of_other_sites(self, context: ServerContext) -> None:
        """Requests that a page of another site can make a browser send are refused.

        In both parts, and nothing is done.
        """
        # Without a token, as a browser would send it: a page of another site does not know one.
        scope, keys, http = context.v2_scope(4), context.keys(2), context.client("")
        scope.store(keys)
        rank, _, namespace = scope.name.partition(":")
        clears = {
            "/v2/clear": encode(Clear(scopes=[scope.name])),
            f"/{rank}/clear": encode({"namespace": namespace}),
        }
        for headers in FOREIGN:
            because = f"a browser sends it with {headers}"
            for path, body in clears.items():
                expect(
                    http.send("POST", path, body, headers=headers),
                    "MD-AUTH-3",
                    401,
                    403,
                    because=f"{path}: {because}",
                )
            expect(
                http.send("GET", "/v2/scopes", None, headers=headers),
                "MD-AUTH-3",
                401,
                403,
                because=because,
            )
        # Content types that a form sends without asking the server first (no CORS preflight). 415
        # will do as well, since nothing is done.
        for kind in FORMS:
            for path, body in clears.items():
                because = f"{path}: a form sends it as {kind}"
                expect(
                    http.send("POST", path, body, content_type=kind),
                    "MD-AUTH-3",
                    401,
                    403,
                    415,
                    because=because,
                )
        expect(http.send("GET", "/healthz", None, content_type=JSON), "MD-AUTH-3", 200)
        # Looked at behind all of them: a server may answer 403 after it has done what was asked.
        if not all(scope.live(keys)):
            raise Violation(
                "MD-AUTH-3",
                "requests of pages of other sites were refused, and the scope was cleared all the "
                "same",
            )
