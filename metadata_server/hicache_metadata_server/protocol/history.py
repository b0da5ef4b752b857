"""Messages of `GET /v2/history`: time series of a server and its slowest calls. Optional."""

from __future__ import annotations

from typing import Final

from hicache_metadata_server.protocol.elements import Answer, Natural, Token
from hicache_metadata_server.protocol.routes import Route

PATH: Final = "/v2/history"
AFTER: Final = "after"
"""Query parameter, in seconds since 1970: return only later samples."""


# Columns of numbers: an hour of samples as objects would be several times as long.
class Series(Answer, frozen=True, kw_only=True):
    """Samples as columns, oldest first. Counts are of the sample's own span."""

    step_seconds: float
    """Approximate seconds between samples."""
    times: list[float]
    """End of each sample, in seconds since 1970."""
    spans: list[float]
    """Seconds of each sample; longer than the step if the server was delayed."""
    requests: list[Natural]
    """Answered requests."""
    refused: list[Natural]
    """Of these, with a status of 400 to 499."""
    failed: list[Natural]
    """Of these, with a status of 500 or more."""
    median_seconds: list[float | None]
    """Time from the last byte of a request to its response, estimated from the buckets of
    `/metrics`; null without requests."""
    p99_seconds: list[float | None]
    hits: list[Natural]
    """Requested keys that were live, in all scopes."""
    misses: list[Natural]
    evicted: list[Natural]
    """Evicted pages."""
    live: list[Natural]
    """Slots of all scopes, at the end of the sample."""
    leased: list[Natural]
    quarantined: list[Natural]
    free: list[Natural]


class SlowCall(Answer, frozen=True, kw_only=True):
    """One of the slowest calls."""

    time: float
    """Time of the response, in seconds since 1970."""
    route: str
    """Route as in `/metrics`."""
    status: int
    seconds: float
    entries: Natural
    """Keys, leases, slots or pins in the request, in all scopes."""
    scopes: Natural
    """Scopes in the request."""
    scope: str = ""
    """The first scope; empty for calls of SGLang's protocol."""
    request_id: str = ""
    """The client's `X-Request-Id`; empty if it sent none."""


class History(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2/history`."""

    instance: str
    """Instance as in `About`; the history begins with its start."""
    started: float
    """Start of the instance, in seconds since 1970."""
    now: float
    seconds: Series
    minutes: Series
    slowest: list[SlowCall]
    """Slowest first."""
    slowest_seconds: float
    """Period of the slowest calls, in seconds."""


ROUTE: Final = Route("GET", PATH, None, History, Token.READ)
