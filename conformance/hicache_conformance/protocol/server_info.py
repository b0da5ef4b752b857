"""Capabilities and limits of the server under test, determined before the first case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import PROTOCOL, About, Limits, StoreDurability, decode

if TYPE_CHECKING:
    from hicache_conformance.protocol.http_client import HttpClient
    from hicache_conformance.protocol.server import RemoteServer

UNKNOWN_LIMITS: Final = Limits(
    body_bytes=8_000_000,
    keys=16_384,
    scopes=16,
    key_bytes=512,
    lease_seconds=30,
    min_lease_seconds=1,
    max_lease_seconds=600,
    max_pin_seconds=60,
    quarantine_seconds=0,
    idempotency_seconds=60,
)
"""Stand in for those of a server that tells none."""


class CannotBeginError(Exception):
    """Nothing can be found out about this server."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Capabilities and limits that rules may rely on."""

    about: About | None
    """None where there is no native part, or where it does not introduce itself as it must."""
    declared: tuple[Need, ...]
    limits: Limits
    lease_seconds: float | None
    """How long a reservation of the compatible part lasts; None where it is for ever."""

    @property
    def undeclared(self) -> list[str]:
        """Requirements of rules that this server does not meet."""
        return [str(need) for need in Need if need not in self.declared]


def look(http: HttpClient, server: RemoteServer, lease_seconds: float | None) -> ServerInfo:
    """Ask the server.

    Raises:
        CannotBeginError: it wants a token that was not given, or refuses the one that was.
    """
    # The first request of a run, before any case: whether cases apply must not depend on what
    # earlier ones did to the server.
    reply = http.get("/v2")
    if reply.status in (401, 403):
        raise CannotBeginError(
            f"the server refuses {'the token' if http.token else 'to answer without --token'}: "
            f"{reply}"
        )
    # Any other answer counts as a native part, also a broken one: otherwise a server whose `/v2`
    # ends in 500 would have its rules not declared in place of broken.
    native = reply.status not in (404, 405)
    about = _about(reply.body) if reply.status == 200 else None
    limits = about.limits if about else UNKNOWN_LIMITS
    # Where nothing is told, a server that was given a directory to keep its state in is taken at
    # its word.
    durable = about.durability is not StoreDurability.NONE if about else server.keeps
    lease = limits.lease_seconds if about else lease_seconds
    found = {
        Need.NATIVE: native,
        Need.LEASES: lease is not None,
        Need.DURABLE: durable,
        Need.TOKENS: bool(http.token),
    }
    return ServerInfo(about, tuple(need for need in Need if found[need]), limits, lease)


def _about(body: bytes) -> About | None:
    try:
        about = decode(body, About)
    except (msgspec.DecodeError, UnicodeError):
        return None
    # Another protocol at this path tells nothing about limits; MD-API-2 then fails on the
    # introduction itself.
    return about if about.protocol == PROTOCOL else None
