"""Audit log of admin calls, cleared scopes, refusals and reloads: a logger of its own."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import structlog

from hicache_metadata_server.core.tenants import ANYBODY, Caller, TokenBucket
from hicache_metadata_server.logs import AUDIT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TEXT: Final = 200
"""Maximum characters of a text that a client has sent."""
NAMES: Final = 16
"""Maximum scope names in a line; beyond, the line has their number as well."""
BURST: Final = 10.0
"""Refusals of one host that are written one by one; after that, one a second, with the number of
those left out."""
MAX_HOSTS: Final = 1024


class AuditLog:
    """Audit log, of the event loop; by default, lines go to the logger `AUDIT`."""

    def __init__(
        self,
        write: Callable[..., None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.write = write or structlog.get_logger(AUDIT).info
        self._clock = clock
        self._hosts: OrderedDict[str, tuple[TokenBucket, int]] = OrderedDict()
        """By host the bucket of its refusals, and those left out since the last one written."""

    def request(
        self, route: str, status: int, caller: Caller, peer: str, fields: Mapping[str, Any]
    ) -> None:
        """Write an admin call, or one that empties scopes."""
        self.write("request", **_caller_fields(caller, peer), route=route, **fields, status=status)

    def refused(self, route: str, status: int, code: str, caller: Caller | None, peer: str) -> None:
        """Write a refused request; of many by one host, a sample and their number."""
        # By host and not by port: each attempt may come from a connection of its own. Without a
        # limit, anybody who reaches the port could fill the disk.
        host, now = peer.rpartition(":")[0], self._clock()
        known = self._hosts.pop(host, None)
        bucket, left_out = known or (TokenBucket(1.0, BURST, now), 0)
        is_written = not bucket.take(now)
        self._hosts[host] = bucket, 0 if is_written else left_out + 1
        # The least recently seen host goes: refusals from many addresses must not fill the memory.
        if len(self._hosts) > MAX_HOSTS:
            self._hosts.popitem(last=False)
        if is_written:
            more = {"not_written": left_out} if left_out else {}
            self.write(
                "refused",
                **_caller_fields(caller or ANYBODY, peer),
                route=route[:TEXT],
                status=status,
                code=code,
                **more,
            )


def audit_fields(message: Any, names: Sequence[str]) -> dict[str, Any]:
    """Fields of a request for its audit line, bounded in size, without page keys."""
    found: dict[str, Any] = {"scopes": list(names[:NAMES])} if names else {}
    if len(names) > NAMES:
        found["scopes_in_all"] = len(names)
    enabled = getattr(message, "enabled", None)
    return found if enabled is None else {**found, "enabled": enabled}


def peer_of(client: Sequence[Any] | None) -> str:
    """Address and port of a peer as text; empty where unknown."""
    return f"{client[0]}:{client[1]}" if client else ""


def _caller_fields(caller: Caller, peer: str) -> dict[str, str]:
    return {"token": caller.token, "tenant": caller.tenant, "peer": peer}
