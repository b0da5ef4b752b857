"""The messages of `GET /v2/history`, which a server may also offer: what it did over time, and its
slowest calls."""

from __future__ import annotations

from typing import Final

from hicache_metadata_server.protocol.elements import Answer, Natural, Token
from hicache_metadata_server.protocol.routes import Route

PATH: Final = "/v2/history"
AFTER: Final = "after"
"""A parameter of the query, in seconds since 1970: leave out samples that are not later."""


class Series(Answer, frozen=True, kw_only=True):
    """Samples, oldest first, as columns: entry i of each is about sample i. Counts are of the
    sample's own time."""

    step_seconds: float
    """Between samples, about."""
    times: list[float]
    """When each sample ends, in seconds since 1970."""
    spans: list[float]
    """Seconds that each sample covers; more than the step where the server was held up."""
    requests: list[Natural]
    """That were answered."""
    refused: list[Natural]
    """Of these, with a status of 400 to 499."""
    failed: list[Natural]
    """Of these, with a status of 500 or more."""
    median_seconds: list[float | None]
    """From the last byte of a request to its answer, estimated within the buckets of `/metrics`;
    null where nothing was answered."""
    p99_seconds: list[float | None]
    hits: list[Natural]
    """Keys that were asked for and were live, in all scopes."""
    misses: list[Natural]
    evicted: list[Natural]
    """Pages."""
    live: list[Natural]
    """Slots of all scopes, at the end of the sample."""
    leased: list[Natural]
    quarantined: list[Natural]
    free: list[Natural]


class SlowCall(Answer, frozen=True, kw_only=True):
    """One of the slowest calls."""

    time: float
    """When it was answered, in seconds since 1970."""
    route: str
    """As in `/metrics`."""
    status: int
    seconds: float
    entries: Natural
    """Keys, leases, slots or pins that it named, in all scopes."""
    scopes: Natural
    """Scopes that it named."""
    scope: str = ""
    """The first of them; empty for calls of the compatible part."""
    request_id: str = ""
    """As the client gave it in `X-Request-Id`; empty where it gave none."""


class History(Answer, frozen=True, kw_only=True):
    """Answer of `GET /v2/history`."""

    instance: str
    """As in `About`: nothing here goes back beyond the start of that one."""
    started: float
    """In seconds since 1970."""
    now: float
    seconds: Series
    minutes: Series
    slowest: list[SlowCall]
    """Slowest first."""
    slowest_seconds: float
    """How far back they go."""


ROUTE: Final = Route("GET", PATH, None, History, Token.READ)
