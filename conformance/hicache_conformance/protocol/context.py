"""The context of a case.

Fresh scopes and keys on the server under test, a random source, and waits for conditions.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.violation import Inconclusive, Violation
from hicache_conformance.protocol.http_client import HttpClient
from hicache_conformance.protocol.sglang_client import SglangScope
from hicache_conformance.protocol.v2_client import V2Client, V2Scope
from hicache_metadata_server.protocol import Reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_conformance.model.profiles import Profile
    from hicache_conformance.protocol.server import RemoteServer
    from hicache_conformance.protocol.server_info import ServerInfo

SLACK_SECONDS: Final = 1.0
"""How late a server's own clock may act."""
POLL_SECONDS: Final = 0.02
BATCH: Final = 128


class ServerContext:
    """One case's view of the server."""

    def __init__(
        self,
        *,
        server: RemoteServer,
        server_info: ServerInfo,
        http: HttpClient,
        case: str,
        seed: int,
        run: str,
        profile: Profile,
        patience: float,
        tokens: dict[str, str],
    ) -> None:
        self.server = server
        self.server_info = server_info
        self.http = http
        self.profile = profile
        self.tokens = tokens
        self.chance = random.Random(f"{seed}:{case}")
        self.native = V2Client(http)
        self.patience = patience
        """Seconds that a case may wait for the server's clock."""
        # The run's name keeps the scopes of a run that is repeated by its seed apart from those of
        # the first, and the number keeps the cases of a run apart.
        self._label = f"{run}-{self.number(0, 2**40):010x}"
        self._made = 0
        self._clients = list[HttpClient]()

    def number(self, low: int, high: int) -> int:
        """A drawn number, both ends included."""
        return self.chance.randint(low, high)

    def keys(self, count: int) -> list[str]:
        """New keys in the form that engines send: hexadecimal digests."""
        return [f"{self.chance.getrandbits(256):064x}" for _ in range(count)]

    def unused_scope(self) -> SglangScope:
        """A scope that the server has not heard of."""
        self._made += 1
        return SglangScope(self.http, self.number(0, 63), f"cf-{self._label}-{self._made}")

    def scope(self, pages: int) -> SglangScope:
        """A new scope, initialized by the compatible part."""
        scope = self.unused_scope()
        scope.initialize(pages)
        return scope

    def v2_scope(
        self, slots: int, *, slot_bytes: int = 4096, earlier_lease_seconds: float = 0.0
    ) -> V2Scope:
        """A new scope, initialized by the native part."""
        scope = V2Scope(self.native, self.unused_scope().name, slots, slot_bytes, self.chance)
        scope.initialize(earlier_lease_seconds)
        return scope

    def client(self, token: str | None = None) -> HttpClient:
        """Another client, which lives as long as this context."""
        # A client of its own is a connection of its own: what a server keeps for each connection
        # must not decide who owns a slot.
        self._clients.append(
            HttpClient(
                self.server.url,
                self.http.token if token is None else token,
                self.http.answer_seconds,
            )
        )
        return self._clients[-1]

    def close(self) -> None:
        """Close what its clients have opened."""
        for client in self._clients:
            client.close()

    @property
    def rest_seconds(self) -> float:
        """Longest time until a slot that was let go is assigned again."""
        quarantine = self.server_info.limits.quarantine_seconds
        self.can_wait(quarantine, "the quarantine")
        # The slack is what MD-LEASE-3 grants a server whose clock acts by a timer.
        return quarantine + SLACK_SECONDS

    @property
    def abandoned_seconds(self) -> float:
        """Longest time until a reservation of the compatible part ends that nobody confirms."""
        assert self.server_info.lease_seconds is not None, "only for cases that need leases"
        self.can_wait(self.server_info.lease_seconds, "a lease")
        return self.server_info.lease_seconds + SLACK_SECONDS

    @property
    def cleared_seconds(self) -> float | None:
        """Longest time until a slot that was reserved when its scope was cleared is assigned again.

        Reserved by the compatible part.

        Its writer may write as long as the reservation would have lasted. None for longer than a
        case may wait.
        """
        lease = self.server_info.lease_seconds or 0.0
        return None if lease > self.patience else lease + self.rest_seconds

    def can_wait(self, seconds: float, what: str) -> None:
        """See that this case may wait so long.

        Raises:
            Inconclusive: it may not.
        """
        if seconds > self.patience:
            raise Inconclusive(
                f"{what} lasts {seconds:g} s here; start the server with less, or give --patience "
                f"{seconds:g}"
            )

    @contextmanager
    def while_held(self) -> Generator[None]:
        """Wrap checks that are true only as long as reservations made inside last.

        Where that took too long here, nothing was found out.
        """
        begin = time.monotonic()
        try:
            yield
        except Violation as violation:
            # Only a violation asks for the time. A case that passed although its reservations may
            # have ended has found nothing wrong all the same.
            took = time.monotonic() - begin
            if self.server_info.lease_seconds is not None and took > self.server_info.lease_seconds:
                raise Inconclusive(
                    f"reservations last {self.server_info.lease_seconds:g} s here and the case "
                    f"took {took:.1f} s"
                ) from violation
            raise

    def reserve_all(self, scope: SglangScope, keys: Sequence[str], rule: str) -> dict[str, int]:
        """The slots of those keys that get one, in batches that every server takes."""
        # A server may refuse larger batches than it tells (MD-LIM-1), and one without `/v2` tells
        # none.
        size, slots = min(BATCH, self.server_info.limits.keys), dict[str, int]()
        for start in range(0, len(keys), size):
            batch = keys[start : start + size]
            for key, (exists, index) in zip(batch, scope.reserve(batch, rule=rule), strict=True):
                if index >= 0 and not exists:
                    slots[key] = index
        return slots

    def reserve_soon(
        self,
        scope: SglangScope,
        keys: Sequence[str],
        rule: str,
        because: str,
        seconds: float | None = None,
    ) -> list[int]:
        """Reserve keys, again and again while slots are in quarantine, and return their slots.

        Raises:
            Violation: of `rule`, where not all of them got a slot in time.
        """
        slots = dict[str, int]()

        def all_have_slots() -> bool:
            # Slots that were got stay reserved while the others are waited for: given back, they
            # would begin a quarantine of their own.
            slots.update(self.reserve_all(scope, [key for key in keys if key not in slots], rule))
            return len(slots) == len(keys)

        self.eventually(
            rule,
            lambda: f"{because}; only {len(slots)} of {len(keys)} keys get a slot",
            all_have_slots,
            seconds,
        )
        return [slots[key] for key in keys]

    def lease_soon(self, scope: V2Scope, keys: Sequence[str], rule: str, because: str) -> list[int]:
        """The same by the native part, with leases that outlast the wait; returns the leases."""
        leases = dict[str, int]()

        def all_have_leases() -> bool:
            missing = [key for key in keys if key not in leases]
            answer = scope.reserve(missing, lease_seconds=self.server_info.limits.max_lease_seconds)
            for key, state, lease in zip(missing, answer.states, answer.leases, strict=True):
                if state is Reserved.LEASED:
                    leases[key] = lease
            return len(leases) == len(keys)

        self.eventually(
            rule,
            lambda: f"{because}; only {len(leases)} of {len(keys)} keys get a lease",
            all_have_leases,
        )
        return [leases[key] for key in keys]

    def eventually(
        self,
        rule: str,
        what: Callable[[], str],
        holds: Callable[[], bool],
        seconds: float | None = None,
    ) -> None:
        """Wait until a condition holds; by default as long as slots may rest.

        Raises:
            Violation: it does not within that time.
        """
        limit = self.rest_seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        while not holds():
            # Looked at after the condition, so that it is tried at least once, and once more after
            # a sleep that took too long.
            if time.monotonic() > deadline:
                raise Violation(rule, f"{what()} within {limit:.1f} s")
            time.sleep(POLL_SECONDS)

    def restart(self) -> None:
        """Kill -9 the server, and start it again.

        Raises:
            Inconclusive: it is not ours to kill.
        """
        self.must_be_ours()
        self.server.kill()
        self.server.start()
        # The connection to the killed server is dead, and the next request would have no answer,
        # which counts against the server (MD-HTTP-1).
        self.http.drop()

    def must_be_ours(self) -> None:
        """See that the server can be killed.

        Raises:
            Inconclusive: it is not ours to kill.
        """
        if not self.server.can_restart:
            raise Inconclusive(
                "the server can be killed only if the suite has started it: --start-server instead "
                "of --url"
            )
