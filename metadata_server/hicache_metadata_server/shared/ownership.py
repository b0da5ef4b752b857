"""Leases of servers, and the choice of a new owner. No I/O; the time is an argument.

docs/design/metadata-scopes.md says why two servers never serve one scope.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from hicache_metadata_server.protocol import ScopeGeometry  # noqa: TC001 - read by msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEASE_SECONDS: Final = 3.0
MARGIN: Final = 0.1
"""Share of a lease by which it ends earlier than the others wait: clocks may differ in rate."""


def boot_time() -> float:
    """Seconds since the machine was started, also those for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def _place() -> str:
    """Boot of this machine and pid namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> str:
    """Name of this process, by which others on this machine find out that it has ended."""
    return f"{_place()} {os.getpid()}"


def process_has_ended(process: str) -> bool:
    """True if a process of this machine and pid namespace does not exist; False if unknown."""
    place, _, number = process.rpartition(" ")
    if not place or place != _place():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


class ServerRecord(msgspec.Struct, frozen=True, array_like=True):
    """One incarnation of a server, as it publishes itself with each heartbeat."""

    url: str
    """Address for clients."""
    beat: int
    """Number of the heartbeat."""
    lease_seconds: float
    scopes: int = 0
    """Number of scopes that it owns."""
    draining: bool = False
    process: str = ""
    """`this_process`; empty for unknown."""


class ScopeEntry(msgspec.Struct, frozen=True, array_like=True):
    """One scope in the map that servers share. The head of a scope decides who owns it."""

    geometry: ScopeGeometry
    owner: str = ""
    """Incarnation that owned it when it was published; empty for none."""
    group: str = ""
    """Scopes of one group have one owner."""
    tenant: str = ""


DECODE_SERVER: Final = msgspec.msgpack.Decoder(ServerRecord).decode
DECODE_SCOPE: Final = msgspec.msgpack.Decoder(ScopeEntry).decode


class Incarnation:
    """One life of a server as an owner, with the lease that its heartbeats renew."""

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self.id = secrets.token_hex(8)
        self.lease_seconds = lease_seconds
        self._until: float | None = None

    def holds(self, now: float) -> bool:
        """True while the lease lasts. Nothing may be answered from memory without it."""
        return self._until is not None and now < self._until

    def has_ended(self, now: float) -> bool:
        """True if the lease has ended, for good."""
        return self._until is not None and now >= self._until

    def renew(self, sent: float, now: float) -> bool:
        """Renew the lease by a heartbeat that was sent at a time, and is confirmed now.

        Returns False if the incarnation had ended before: others may own its scopes by now.
        """
        if self.has_ended(now):
            return False
        self._until = sent + self.lease_seconds * (1 - MARGIN)
        return True


class _Seen(NamedTuple):
    record: bytes
    """Empty while there is none."""
    since: float


class Observer:
    """What one server knows about the leases of the others, from polls of their records."""

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self._lease_seconds = lease_seconds
        """Of an incarnation without record."""
        self._run_id = b""
        self._seen: dict[str, _Seen] = {}
        self._sent = self._received = 0.0
        """Times of the last poll."""

    def observe(
        self, records: Mapping[str, bytes], run_id: bytes, sent: float, received: float
    ) -> None:
        """Take in the answer of a poll: records by incarnation, and the id of the Redis.

        Another Redis than before was promised less, and may have older records, so all observations
        begin anew. `sent` is the time before the poll was sent.
        """
        before = self._seen if run_id == self._run_id else {}
        self._run_id = run_id
        self._sent = sent
        self._received = received
        self._seen = {}
        for server in before.keys() | records.keys():
            record, known = records.get(server, b""), before.get(server)
            self._seen[server] = (
                known if known is not None and known.record == record else _Seen(record, received)
            )

    def is_gone(self, server: str) -> bool:
        """True if an incarnation has ended for certain: its record has not changed for a lease."""
        return self.silence(server) >= 1

    def silence(self, server: str) -> float:
        """How long the record of an incarnation has not changed, in its leases."""
        seen = self._seen.setdefault(server, _Seen(b"", self._received))
        lease = DECODE_SERVER(seen.record).lease_seconds if seen.record else self._lease_seconds
        return (self._sent - seen.since) / lease


def ready_servers(servers: Mapping[str, ServerRecord]) -> list[str]:
    """Servers that may take scopes: those that do not drain, or all if every one does."""
    return [name for name in sorted(servers) if not servers[name].draining] or sorted(servers)


def homes(owners: Mapping[str, str], entries: Mapping[str, ScopeEntry]) -> dict[str, str]:
    """Owner of each group: that of the first of its scopes that has one."""
    found = dict[str, str]()
    for name in sorted(entries):
        if owner := owners[name]:
            found.setdefault(entries[name].group, owner)
    return found


def surplus(
    owners: Mapping[str, str],
    entries: Mapping[str, ScopeEntry],
    servers: Mapping[str, ServerRecord],
    me: str,
) -> dict[str, list[str]]:
    """Groups of server `me` that another server should have, with their scopes; smallest first.

    With any one of them, the server with the fewest scopes has fewer than this one has now. So
    servers that are as even as their groups allow move nothing. `owners` are by scope, empty for
    none; `servers` are those that may take scopes.
    """
    loads = Counter(owners.values())
    fewest = min((loads[name] for name in ready_servers(servers)), default=0)
    groups = dict[str, list[str]]()
    for name in sorted(entries):
        if owners[name] == me:
            groups.setdefault(entries[name].group, []).append(name)
    found = [group for group, names in groups.items() if fewest + len(names) < loads[me]]
    return {group: groups[group] for group in sorted(found, key=lambda one: len(groups[one]))}


def placement(
    free: Mapping[str, Sequence[str]],
    servers: Mapping[str, ServerRecord],
    group_homes: Mapping[str, str],
) -> dict[str, str]:
    """Choose the server for the free scopes of each group.

    It is the owner of the group's other scopes, or else the server with the fewest scopes. Every
    server comes to the same result from the same records; where their records differ, the head of
    each scope decides.
    """
    ready = ready_servers(servers)
    loads = Counter({name: servers[name].scopes for name in ready})
    chosen = dict[str, str]()
    for group in sorted(free) if ready else ():
        home = group_homes.get(group, "")
        server = home if home in ready else min(ready, key=lambda name: (loads[name], name))
        loads[server] += len(free[group])
        chosen[group] = server
    return chosen
