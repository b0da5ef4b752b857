"""Routes of the v2 protocol, with their messages and the required token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_metadata_server.protocol.elements import Answer, Request, Token
from hicache_metadata_server.protocol.operations import (
    About,
    Drain,
    Draining,
    Drop,
    Dropped,
    Export,
    Exported,
    Fsck,
    FsckReport,
    Inspect,
    Inspected,
    Scopes,
)
from hicache_metadata_server.protocol.pages import (
    Abort,
    Clear,
    Cleared,
    Commit,
    Delete,
    Describe,
    Initialize,
    Initialized,
    Leases,
    LookedUp,
    Lookup,
    Marked,
    Renew,
    Reserve,
    SettledLeases,
    Touch,
    Unpin,
)

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Route:
    """One route of the v2 protocol."""

    method: str
    path: str
    request: type[Request] | None
    answer: type[Answer] | None
    """None for a response 204."""
    token: Token
    changes: bool = False
    """True if the route takes an idempotency key."""


# Lookups, touches and unpins take no key: doing them twice does no harm. Neither do describe, drop
# and drain, which end in the same state.
ROUTES: Final = {
    route.path: route
    for route in (
        Route("GET", "/v2", None, About, Token.READ),
        Route("POST", "/v2/initialize", Initialize, Initialized, Token.WRITE, changes=True),
        Route("POST", "/v2/describe", Describe, None, Token.WRITE),
        Route("POST", "/v2/lookup", Lookup, LookedUp, Token.READ),
        Route("POST", "/v2/reserve", Reserve, Leases, Token.WRITE, changes=True),
        Route("POST", "/v2/commit", Commit, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/abort", Abort, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/renew", Renew, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/unpin", Unpin, None, Token.READ),
        Route("POST", "/v2/touch", Touch, Marked, Token.READ),
        Route("POST", "/v2/delete", Delete, Marked, Token.WRITE, changes=True),
        Route("POST", "/v2/clear", Clear, Cleared, Token.WRITE, changes=True),
        Route("POST", "/v2/drop", Drop, Dropped, Token.WRITE),
        Route("GET", "/v2/scopes", None, Scopes, Token.READ),
        Route("POST", "/v2/inspect", Inspect, Inspected, Token.READ),
        Route("POST", "/v2/fsck", Fsck, FsckReport, Token.ADMIN),
        Route("POST", "/v2/drain", Drain, Draining, Token.ADMIN),
        Route("POST", "/v2/export", Export, Exported, Token.ADMIN),
    )
}
