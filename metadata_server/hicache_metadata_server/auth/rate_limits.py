"""How many requests a tenant may send in a second."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.tenants import TOO_MANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_metadata_server.core.tenants import Caller, Quotas, Tenants

ENDS: Final = frozenset(("commit", "abort", "renew", "unpin", "confirm_write"))
"""Requests that go on with what was begun: refused, they would waste the pages that are written,
and hold on to slots."""


class _Bucket:
    __slots__ = ("burst", "level", "rate", "since")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.level, self.since = rate, burst, burst, now

    def take(self, now: float, least: float) -> float:
        """Take one; returns in how many seconds there is one, or 0 if it was taken."""
        self.level = min(self.burst, self.level + (now - self.since) * self.rate)
        self.since = now
        if self.level - 1 < least:
            return (least + 1 - self.level) / self.rate
        self.level -= 1
        return 0.0


class Rates:
    """A bucket of requests for each tenant that has a limit; of this process, and from one event
    loop."""

    def __init__(self, tenants: Tenants, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants, self._clock = tenants, clock
        self._quotas: Quotas = tenants.quotas
        self._buckets: dict[str, _Bucket | None] = {}
        self.throttled: dict[str, int] = {}
        """Requests refused so far, by tenant."""

    def admit(self, caller: Caller, route: str) -> None:
        """Count a request.

        What ends something that was begun is counted ahead, as much as a burst.

        Raises:
            RequestError: 429, with the time after which it may come again.
        """
        tenant = caller.tenant
        if not tenant:
            return
        if self._quotas is not self._tenants.quotas:
            self._quotas, self._buckets = self._tenants.quotas, {}
        bucket = self._buckets.get(tenant) if tenant in self._buckets else self._open(tenant)
        if bucket is None:
            return
        seconds = bucket.take(
            self._clock(), -bucket.burst if route.rpartition("/")[2] in ENDS else 0.0
        )
        if seconds:
            self.throttled[tenant] = self.throttled.get(tenant, 0) + 1
            message = f"tenant {tenant!r} may send {bucket.rate:g} requests a second"
            raise RequestError(
                429, TOO_MANY, message, "Authorization", retry_seconds=math.ceil(seconds)
            )

    def _open(self, tenant: str) -> _Bucket | None:
        quota = self._quotas.of(tenant)
        rate = quota.requests_per_second
        bucket = (
            None if rate is None else _Bucket(rate, max(1.0, quota.burst or rate), self._clock())
        )
        self._buckets[tenant] = bucket
        return bucket
