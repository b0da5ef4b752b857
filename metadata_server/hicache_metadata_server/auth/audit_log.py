"""Audit log of admin calls, cleared scopes, refusals and reloads.

One JSON object a line, in a file or in the log.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from hicache_metadata_server.core.tenants import ANYBODY, Caller

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TEXT: Final = 200
"""Maximum characters of a text that a client has sent."""
NAMES: Final = 16
"""Maximum scope names in a line; beyond, the line has their number as well."""
BURST: Final = 10.0
"""Refusals of one host that are written one by one; after that, one a second, with the number of
those left out."""
MAX_HOSTS: Final = 1024

_log = structlog.get_logger()


class AuditEntry:
    """Fields of an audited request, collected before it is answered."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}


class AuditLog:
    """Audit log. Used from the event loop; each line is one unbuffered write.

    Args:
        file: appended to, created with mode 600; None for the log.
        clock: seconds, for the rate of refusals.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self, file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._clock = clock
        self._descriptor = -1 if file is None else _open_for_append(file)
        self._refusals = _HostThrottle()
        self.failures = 0
        """Lines that could not be written to the file, and went to the log instead."""

    def write(self, event: str, **fields: Any) -> None:
        """Write a line; never raises."""
        # The event has happened, and a full disk must not turn its response into an error.
        if self._file is not None:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "event": event,
                **fields,
            }
            # One `write` on a descriptor opened for appending: lines of two servers on one file do
            # not mix, and a crash of the server loses none.
            try:
                os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
            except OSError as error:
                self.failures += 1
                _log.error("audit_failed", file=str(self._file), reason=str(error))
            else:
                return
        # structlog has its own `event`, so that the name goes into another field.
        _log.info("audit", **{"of": event, **fields})

    def request(
        self, route: str, status: int, caller: Caller, peer: str, fields: Mapping[str, Any]
    ) -> None:
        """Write an admin call, or one that empties scopes."""
        self.write("request", **_caller_fields(caller, peer), route=route, **fields, status=status)

    def refused(self, route: str, status: int, code: str, caller: Caller | None, peer: str) -> None:
        """Write a refused request; of many by one host, a sample and their number."""
        # By host and not by port: each attempt may come from a connection of its own. Without a
        # limit, anybody who reaches the port could fill the disk.
        host = peer.rpartition(":")[0]
        left_out = self._refusals.admit(host, self._clock())
        if left_out is not None:
            more = {"not_written": left_out} if left_out else {}
            self.write(
                "refused",
                **_caller_fields(caller or ANYBODY, peer),
                route=route[:TEXT],
                status=status,
                code=code,
                **more,
            )

    def reopen(self) -> None:
        """Reopen the file by its name, after log rotation has moved the old one."""
        if self._file is None:
            return
        try:
            # Opened before the old one is closed: if that fails, lines go on into the old file.
            descriptor = _open_for_append(self._file)
        except OSError as error:
            _log.error("audit_failed", file=str(self._file), reason=str(error))
            return
        previous = self._descriptor
        self._descriptor = descriptor
        os.close(previous)

    def close(self) -> None:
        """Close the file; later lines go to the log."""
        self._file = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _HostThrottle:
    """A token bucket for each host: `BURST` events, then one a second."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, tuple[float, float, int]] = OrderedDict()
        """Level of the bucket, time of that level, and events left out since the last one
        admitted."""

    def admit(self, host: str, now: float) -> int | None:
        """Return the number left out since the last event; None to leave this one out."""
        level, since, left_out = self._hosts.pop(host, (BURST, now, 0))
        level = min(BURST, level + now - since)
        admitted = level >= 1
        self._hosts[host] = (level - 1, now, 0) if admitted else (level, now, left_out + 1)
        # The least recently seen host goes: refusals from many addresses must not fill the memory.
        if len(self._hosts) > MAX_HOSTS:
            self._hosts.popitem(last=False)
        return left_out if admitted else None


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


def _open_for_append(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
