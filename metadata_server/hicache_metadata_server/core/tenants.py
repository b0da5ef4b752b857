"""Callers, tenants of scopes, quotas and rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct, field

from hicache_metadata_server.protocol import Natural, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_metadata_server.protocol import ScopeGeometry

NAME: Final = "[A-Za-z0-9._-]{1,64}"
"""Regular expression of tenant names."""
QUOTA: Final = "quota"
"""Error code of an exceeded quota of scopes, slots or bytes."""
TOO_MANY: Final = "too_many"
"""Error code of an exceeded request rate."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as its token identifies it."""

    token: str = ""
    """Id of the token; empty on a server without tokens."""
    right: Token = Token.ADMIN
    tenant: str = ""
    """Empty for none."""
    sees_all: bool = False
    """True for an admin without tenant, who may use scopes of every tenant."""


ANYBODY: Final = Caller(sees_all=True)
"""The caller on a server without tokens."""


def may_use(caller: Caller, tenant: str) -> bool:
    """True if a caller may use the scopes of a tenant, "" for scopes without one.

    The only access rule, for every kind of store.
    """
    return caller.sees_all or caller.tenant == tenant


class TenantUsage(NamedTuple):
    """Sums over all scopes of a tenant."""

    scopes: int = 0
    slots: int = 0
    bytes: int = 0
    """Slots times slot bytes."""

    @classmethod
    def of(cls, geometries: Iterable[ScopeGeometry]) -> TenantUsage:
        """Sum over scopes."""
        found = list(geometries)
        return cls(
            len(found),
            sum(one.slots for one in found),
            sum(one.slots * one.slot_bytes for one in found),
        )


class Quota(Struct, frozen=True):
    """Limits of one tenant, as its file names them; None for no limit."""

    scopes: Natural | None = field(default=None, name="max_scopes")
    slots: Natural | None = field(default=None, name="max_slots")
    bytes: Natural | None = field(default=None, name="max_bytes")
    """Slots times slot bytes, in all of its scopes."""
    requests_per_second: Annotated[float, Meta(gt=0)] | None = None
    """Rate at each server process."""
    burst: Annotated[float, Meta(ge=1)] | None = None
    """Requests at once after a pause; by default as many as in a second."""

    def __post_init__(self) -> None:
        if self.burst is not None and self.requests_per_second is None:
            raise ValueError("burst needs requests_per_second")
        for name in ("requests_per_second", "burst"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ValueError(f"{name} is no number")

    def beyond(self, held: TenantUsage, new: Sequence[ScopeGeometry]) -> str:
        """Explain why new scopes would exceed this quota; "" if they would not.

        A quota of bytes refuses a scope without `slot_bytes`, which would count as empty whatever
        is written into it.
        """
        if self.bytes is not None and any(not one.slot_bytes for one in new):
            return "its bytes are limited, so that each of its scopes has to say its slot_bytes"
        wanted = TenantUsage.of(new)
        for name, most in (("scopes", self.scopes), ("slots", self.slots), ("bytes", self.bytes)):
            has, more = getattr(held, name), getattr(wanted, name)
            if most is not None and has + more > most:
                return f"it has {has:,} of {most:,} {name}, and this would be {more:,} more"
        return ""


NO_QUOTA: Final = Quota()


class Quotas(Struct, frozen=True):
    """Quotas of all tenants."""

    by_tenant: dict[str, Quota] = field(default_factory=dict[str, Quota])
    default: Quota = NO_QUOTA
    """Quota of a tenant that is not named. Callers without tenant have no quota."""

    def of(self, tenant: str) -> Quota:
        """Quota of one tenant."""
        return self.by_tenant.get(tenant, self.default) if tenant else NO_QUOTA


class TokenBucket:
    """A rate, and a burst that was saved up."""

    __slots__ = ("burst", "level", "rate", "since")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self.level = burst
        self.since = now

    def take(self, now: float, min_level: float = 0.0) -> float:
        """Take one token; returns 0, or the seconds until there is one without taking it."""
        self.level = min(self.burst, self.level + (now - self.since) * self.rate)
        self.since = now
        if self.level - 1 < min_level:
            return (min_level + 1 - self.level) / self.rate
        self.level -= 1
        return 0.0
