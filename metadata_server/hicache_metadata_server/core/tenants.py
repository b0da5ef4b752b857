"""Who asks, whose a scope is, and how much a tenant may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.protocol import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_metadata_server.protocol import ScopeGeometry

NAME: Final = "[A-Za-z0-9._-]{1,64}"
"""How a tenant may be called: a regular expression."""
QUOTA: Final = "quota"
"""The code of a refusal by a quota of scopes, slots or bytes."""
TOO_MANY: Final = "too_many"
"""The code of a refusal by a quota of requests."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as its token says."""

    token: str = ""
    """The token's id; empty where no token is asked for."""
    right: Token = Token.ADMIN
    tenant: str = ""
    """Empty for none."""
    sees_all: bool = False
    """Scopes of every tenant: an admin without a tenant."""


ANYBODY: Final = Caller(sees_all=True)
"""Of a server without tokens."""


def may_use(caller: Caller, tenant: str) -> bool:
    """Whether a caller may use the scopes of a tenant ("" for those of none): the one rule,
    whatever store they are in."""
    return caller.sees_all or caller.tenant == tenant


class Holding(NamedTuple):
    """What a tenant has in all of its scopes."""

    scopes: int = 0
    slots: int = 0
    bytes: int = 0
    """Slots times slot bytes."""

    @classmethod
    def of(cls, geometries: Iterable[ScopeGeometry]) -> Holding:
        """These scopes together."""
        found = list(geometries)
        return cls(
            len(found),
            sum(one.slots for one in found),
            sum(one.slots * one.slot_bytes for one in found),
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that one tenant may have; None for as much as it likes."""

    scopes: int | None = None
    slots: int | None = None
    bytes: int | None = None
    requests_per_second: float | None = None
    """Of each server process."""
    burst: float = 0.0
    """Requests that may come at once after a pause."""

    def beyond(self, held: Holding, new: Sequence[ScopeGeometry]) -> str:
        """Why a tenant that has this much may not have these scopes as well; "" if it may.

        A scope that does not say how large its slots are would be one of no bytes, whatever is
        written into it: where bytes are limited it is refused.
        """
        if self.bytes is not None and any(not one.slot_bytes for one in new):
            return "its bytes are limited, so that each of its scopes has to say its slot_bytes"
        wanted = Holding.of(new)
        for name, most in (("scopes", self.scopes), ("slots", self.slots), ("bytes", self.bytes)):
            has, more = getattr(held, name), getattr(wanted, name)
            if most is not None and has + more > most:
                return f"it has {has:,} of {most:,} {name}, and this would be {more:,} more"
        return ""


NO_QUOTA: Final = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """Of all tenants."""

    by_tenant: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    default: Quota = NO_QUOTA
    """Of a tenant that is not named. Who has no tenant has no quota."""

    def of(self, tenant: str) -> Quota:
        """Of one tenant."""
        return self.by_tenant.get(tenant, self.default) if tenant else NO_QUOTA


class Tenants:
    """Whose the scopes of one server are."""

    def __init__(self) -> None:
        self.of_scope: dict[str, str] = {}
        """The tenant of each scope, "" for none."""
        self.quotas = Quotas()

    def check_access(self, caller: Caller, names: Sequence[str], fields: str) -> None:
        """See that a caller may use those of these scopes that are there.

        Args:
            caller: who asks.
            names: of scopes.
            fields: how the request calls them, with `{}` for the number of one.

        Raises:
            RequestError: 403 for the first that is another tenant's.
        """
        of_scope, tenant = self.of_scope, caller.tenant
        for number, name in enumerate(names):
            if not may_use(caller, of_scope.get(name, tenant)):
                raise RequestError(
                    403, "forbidden", f"scope {name!r} is another tenant's", fields.format(number)
                )

    def check_quota(
        self, tenant: str, held: Iterable[ScopeGeometry], new: Sequence[ScopeGeometry], field: str
    ) -> None:
        """See that a tenant that has some scopes may have others as well.

        Raises:
            RequestError: 403 `quota` if it may not.
        """
        quota = self.quotas.of(tenant)
        if quota is NO_QUOTA or not new:
            return
        if quota.beyond(Holding.of(held), new):
            raise beyond_quota(tenant, quota, Holding.of(held), new, field)


def beyond_quota(
    tenant: str, quota: Quota, held: Holding, new: Sequence[ScopeGeometry], field: str = "scopes"
) -> RequestError:
    """Says why a tenant may not have these scopes as well."""
    return RequestError(
        403, QUOTA, f"tenant {tenant!r} is at its quota: {quota.beyond(held, new)}", field
    )
