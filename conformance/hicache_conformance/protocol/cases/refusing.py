"""Cost of refusing a request body."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import JSON, MSGPACK, Lookup, LookupScope, encode

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.http_client import HttpClient, Reply

HEALTH_SECONDS: Final = 1.0
FACTOR: Final = 3.0
SLACK_SECONDS: Final = 2.0
"""More than a busy machine takes for either body."""
MAX_KEYS: Final = 16_384
MAX_BYTES: Final = 8 << 20


class RefusingCases:
    """Nobody else notices."""

    @covers("MD-REQ-7", levels=[Level.FAULTS], needs=[Need.NATIVE])
    def test_bodies_that_are_refused_cost_no_more_than_others(self, context: ServerContext) -> None:
        """Of the longest lookups, a wrong one is refused in the time that a right one takes.

        Its last key is wrong; health goes on meanwhile.
        """
        limits, scope = context.server_info.limits, context.v2_scope(4)
        count = min(limits.keys, MAX_KEYS)
        length = min(limits.key_bytes, (min(limits.body_bytes, MAX_BYTES) - 1000) // count - 8)
        keys = [key * (length // 64 + 1) for key in context.keys(8)]
        right = [f"{i:08x}{keys[i % 8]}"[:length] for i in range(count)]
        for content_type in (JSON, MSGPACK):
            lookup = encode(
                Lookup(scopes=[LookupScope(scope=scope.name, keys=right)]), content_type
            )
            wrong = encode(
                {"scopes": [{"scope": scope.name, "keys": [*right[:-1], 7]}]}, content_type
            )
            served, reply = self._timed(context.http, lookup, content_type)
            expect(reply, "MD-REQ-7", 200, because=f"a lookup of {count} keys as {content_type}")
            health = _Health(context.client())
            health.start()
            refused, reply = self._timed(context.http, wrong, content_type)
            worst = health.stop()
            expect(reply, "MD-REQ-7", 422, because=f"the last of {count} keys is a number")
            if refused > FACTOR * served + SLACK_SECONDS:
                raise Violation(
                    "MD-REQ-7",
                    f"{len(wrong)} bytes of {content_type} are refused in {refused:.1f} s; as many "
                    f"that are right take {served:.1f} s",
                )
            if worst > HEALTH_SECONDS:
                raise Violation(
                    "MD-REQ-7",
                    f"/healthz takes {worst:.1f} s while {len(wrong)} bytes of {content_type} are "
                    f"refused",
                )

    def _timed(self, http: HttpClient, body: bytes, content_type: str) -> tuple[float, Reply]:
        begin = time.monotonic()
        reply = http.send("POST", "/v2/lookup", body, content_type=content_type)
        return time.monotonic() - begin, reply


class _Health(threading.Thread):
    """Asks for the server's health until it is stopped."""

    def __init__(self, http: HttpClient) -> None:
        super().__init__(daemon=True)
        self._http = http
        self._stopped = threading.Event()
        self._worst = 0.0
        self._error: Violation | None = None

    def run(self) -> None:
        """Go on until stopped."""
        while not self._stopped.wait(0.01):
            begin = time.monotonic()
            try:
                self._http.get("/healthz")
            except Violation as error:
                self._error = error
                return
            finally:
                self._worst = max(self._worst, time.monotonic() - begin)

    def stop(self) -> float:
        """The longest that an answer has taken.

        Raises:
            Violation: there was none.
        """
        self._stopped.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._worst
