"""Rate limits of tenants: a token bucket of requests each."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.tenants import TOO_MANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_metadata_server.core.tenants import Caller, Quotas, Tenants

COMPLETIONS: Final = frozenset(("commit", "abort", "renew", "unpin", "confirm_write"))
"""Requests that complete an earlier one. Refusing them would waste the pages written in between, and
keep their slots leased."""


class _TokenBucket:
    __slots__ = ("burst", "level", "rate", "since")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self.level = burst
        self.since = now

    def take(self, now: float, min_level: float) -> float:
        """Take one token; returns 0, or the seconds until there is one without taking it."""
        self.level = min(self.burst, self.level + (now - self.since) * self.rate)
        self.since = now
        if self.level - 1 < min_level:
            return (min_level + 1 - self.level) / self.rate
        self.level -= 1
        return 0.0


class RateLimiter:
    """Token buckets of the tenants that have a limit.

    Each server process counts for itself. Used from one event loop.
    """

    def __init__(self, tenants: Tenants, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = tenants
        self._clock = clock
        self._quotas: Quotas = tenants.quotas
        self._buckets: dict[str, _TokenBucket | None] = {}
        self.throttled: dict[str, int] = {}
        """Number of refused requests by tenant."""

    def admit(self, caller: Caller, route: str) -> None:
        """Count a request of a tenant.

        Raises:
            RequestError: 429, with the seconds to wait.
        """
        tenant = caller.tenant
        if not tenant:
            return
        # A reload of the tenants file replaces the quotas as a whole, and may have changed any rate.
        if self._quotas is not self._tenants.quotas:
            self._quotas = self._tenants.quotas
            self._buckets = {}
        bucket = self._buckets.get(tenant) if tenant in self._buckets else self._new_bucket(tenant)
        if bucket is None:
            return
        # Completions may overdraw the bucket by a burst: they are counted, so that they are no way
        # around the limit, and the tenant's next new request waits for them.
        min_level = -bucket.burst if route.rpartition("/")[2] in COMPLETIONS else 0.0
        seconds = bucket.take(self._clock(), min_level)
        if seconds:
            self.throttled[tenant] = self.throttled.get(tenant, 0) + 1
            message = f"tenant {tenant!r} may send {bucket.rate:g} requests a second"
            raise RequestError(
                429, TOO_MANY, message, "Authorization", retry_seconds=math.ceil(seconds)
            )

    def _new_bucket(self, tenant: str) -> _TokenBucket | None:
        quota = self._quotas.of(tenant)
        rate = quota.requests_per_second
        # Also None is kept: tenants without a limit need no look at the quotas either.
        bucket = (
            None
            if rate is None
            else _TokenBucket(rate, max(1.0, quota.burst or rate), self._clock())
        )
        self._buckets[tenant] = bucket
        return bucket
