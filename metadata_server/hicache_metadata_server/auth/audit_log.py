"""Who has done what an operator may have to answer for: one JSON object a line, in a file or in the
log."""

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
"""Characters of anything that a client has sent."""
NAMES: Final = 16
"""Scopes that are named; of more, how many they are."""
BURST: Final = 10.0
"""Refusals of one peer that are written one by one; after that, one a second, with the number of
those in between."""
PEERS: Final = 1024

_log = structlog.get_logger()


class Entry:
    """What is written of a request when it is answered."""

    __slots__ = ("about",)

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}


class Audit:
    """Writes events. Used from the event loop; a line goes to the operating system at once, in one
    call.

    Args:
        file: appended to, made with mode 600; None for the log.
        clock: seconds, for how often refusals are written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self, file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._clock = file, clock
        self._descriptor = -1 if file is None else _opened(file)
        self._refusals = _Sieve()
        self.failures = 0
        """Lines that could not be written to the file, and went to the log."""

    def write(self, event: str, **told: Any) -> None:
        """Write one; never raises, because what it tells has happened."""
        if self._file is not None:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "event": event,
                **told,
            }
            try:
                os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
            except OSError as error:
                self.failures += 1
                _log.error("audit_failed", file=str(self._file), reason=str(error))
            else:
                return
        _log.info("audit", **{"of": event, **told})

    def request(
        self, route: str, status: int, caller: Caller, peer: str, about: Mapping[str, Any]
    ) -> None:
        """An admin call, or one that has emptied scopes."""
        self.write("request", **_who(caller, peer), route=route, **about, status=status)

    def refused(self, route: str, status: int, code: str, caller: Caller | None, peer: str) -> None:
        """A request without the right to be done; of many by the same host, some, with the number
        of the others."""
        host = peer.rpartition(":")[0]
        passed = self._refusals.pass_on(host, self._clock())
        if passed is not None:
            more = {"not_written": passed} if passed else {}
            self.write(
                "refused",
                **_who(caller or ANYBODY, peer),
                route=route[:TEXT],
                status=status,
                code=code,
                **more,
            )

    def reopen(self) -> None:
        """Go on in the file that has its name now: the one before may have been moved away."""
        if self._file is None:
            return
        try:
            descriptor = _opened(self._file)
        except OSError as error:
            _log.error("audit_failed", file=str(self._file), reason=str(error))
            return
        before, self._descriptor = self._descriptor, descriptor
        os.close(before)

    def close(self) -> None:
        """Let go of the file; what is written after goes to the log."""
        self._file = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Sieve:
    """Lets some of many through: of each name as many as `BURST`, then one a second."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float, int]] = OrderedDict()
        """How many may pass, since when that holds, and how many did not since the last that
        did."""

    def pass_on(self, name: str, now: float) -> int | None:
        """How many were held back since the last one that passed; None if this one is, too."""
        level, since, held = self._seen.pop(name, (BURST, now, 0))
        level = min(BURST, level + now - since)
        passes = level >= 1
        self._seen[name] = (level - 1, now, 0) if passes else (level, now, held + 1)
        if len(self._seen) > PEERS:
            self._seen.popitem(last=False)
        return held if passes else None


def about(message: Any, names: Sequence[str]) -> dict[str, Any]:
    """What a request asks for, in a bounded number of words; keys of pages are none of them."""
    found: dict[str, Any] = {"scopes": list(names[:NAMES])} if names else {}
    if len(names) > NAMES:
        found["scopes_in_all"] = len(names)
    enabled = getattr(message, "enabled", None)
    return found if enabled is None else {**found, "enabled": enabled}


def peer_of(client: Sequence[Any] | None) -> str:
    """An address as it is written; empty where it is not known."""
    return f"{client[0]}:{client[1]}" if client else ""


def _who(caller: Caller, peer: str) -> dict[str, str]:
    return {"token": caller.token, "tenant": caller.tenant, "peer": peer}


def _opened(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
