"""Bearer tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Inconclusive
from hicache_conformance.protocol.http_client import expect
from hicache_conformance.protocol.rules import Need
from hicache_conformance.protocol.v2_client import V2Client
from hicache_metadata_server.protocol import (
    Drain,
    Lookup,
    LookupScope,
    Request,
    Reserve,
    ReserveScope,
    Token,
)

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext


class TokenCases:
    """Permissions of each token."""

    @covers("MD-AUTH-1", needs=[Need.NATIVE, Need.TOKENS])
    def test_without_a_token(self, context: ServerContext) -> None:
        """Both parts refuse calls without a token, and with one that nobody gave out, with 401.

        Health asks for none.
        """
        scope, keys = context.v2_scope(4), context.keys(1)
        rank, _, namespace = scope.name.partition(":")
        for token, what in (("", "without a token"), (context.keys(1)[0], "with an unknown token")):
            http = context.client(token)
            client = V2Client(http)
            for path, request in self._calls(scope.name, keys).items():
                expect(client.send(path, request), "MD-AUTH-1", 401, because=f"{path} {what}")
            reply = http.post(f"/{rank}/exists", {"keys": keys, "namespace": namespace})
            expect(reply, "MD-AUTH-1", 401, because=f"the compatible part {what}")
            # Orchestrators have no token (MD-OPS-5).
            for path in ("/healthz", "/readyz"):
                expect(http.get(path), "MD-AUTH-1", 200, because=f"{path} {what}")

    @covers("MD-AUTH-2", needs=[Need.NATIVE, Need.TOKENS])
    def test_tokens_that_permit_less(self, context: ServerContext) -> None:
        """A read token looks up and cannot reserve, a write token reserves and cannot drain.

        They are refused with 403.
        """
        missing = [kind for kind in (Token.READ, Token.WRITE) if not context.tokens.get(kind)]
        if missing:
            raise Inconclusive(f"no token of less rights was given: --{missing[0]}-token")
        scope, keys = context.v2_scope(4), context.keys(1)
        calls = self._calls(scope.name, keys)
        permits = {
            Token.READ: ("/v2", "/v2/lookup"),
            Token.WRITE: ("/v2", "/v2/lookup", "/v2/reserve"),
        }
        for kind, paths in permits.items():
            client = V2Client(context.client(context.tokens[kind]))
            for path, request in calls.items():
                expect(
                    client.send(path, request),
                    "MD-AUTH-2",
                    200 if path in paths else 403,
                    because=f"{path} with a {kind} token",
                )

    def _calls(self, scope: str, keys: list[str]) -> dict[str, Request | None]:
        return {
            "/v2": None,
            "/v2/lookup": Lookup(scopes=[LookupScope(scope=scope, keys=keys)]),
            "/v2/reserve": Reserve(scopes=[ReserveScope(scope=scope, keys=keys)]),
            # Off, so that a server which lets it through wrongly does not stop serving the cases
            # that follow.
            "/v2/drain": Drain(enabled=False),
        }
