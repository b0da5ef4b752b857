"""Limits, and malformed requests of the native part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import Reply, expect, refused
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import (
    MSGPACK,
    Commit,
    CommitScope,
    Lookup,
    LookupScope,
    Problem,
    decode,
)

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext

WRONG: Final[tuple[tuple[str, dict[str, Any], str], ...]] = (
    ("lookup", {}, "scopes"),
    ("lookup", {"scopes": {}}, "scopes"),
    ("lookup", {"scopes": [{"keys": []}]}, "scope"),
    ("lookup", {"scopes": [{"scope": "kv", "keys": []}]}, "scope"),
    ("lookup", {"scopes": [{"scope": "-1:kv", "keys": []}]}, "scope"),
    ("lookup", {"scopes": [{"scope": "0:a b", "keys": []}]}, "scope"),
    ("lookup", {"scopes": [{"scope": "SCOPE", "keys": "abc"}]}, "keys"),
    ("lookup", {"scopes": [{"scope": "SCOPE", "keys": [""]}]}, "keys"),
    ("lookup", {"scopes": [{"scope": "SCOPE", "keys": [7]}]}, "keys"),
    ("lookup", {"scopes": [], "pin_seconds": -1}, "pin_seconds"),
    ("lookup", {"scopes": [], "pin_second": 1}, "pin_second"),
    (
        "reserve",
        {"scopes": [{"scope": "SCOPE", "keys": ["a", "b"], "prefixes": ["a"]}]},
        "prefixes",
    ),
    ("reserve", {"scopes": [], "lease_seconds": 0}, "lease_seconds"),
    ("reserve", {"scopes": [], "lease_seconds": "1"}, "lease_seconds"),
    (
        "commit",
        {"scopes": [{"scope": "SCOPE", "leases": [1], "lengths": [], "checksums": [1]}]},
        "lengths",
    ),
    (
        "commit",
        {"scopes": [{"scope": "SCOPE", "leases": [1], "lengths": [0], "checksums": [1]}]},
        "lengths",
    ),
    (
        "commit",
        {"scopes": [{"scope": "SCOPE", "leases": [1], "lengths": [1], "checksums": [-1]}]},
        "checksums",
    ),
    (
        "commit",
        {"scopes": [{"scope": "SCOPE", "leases": [0], "lengths": [1], "checksums": [1]}]},
        "leases",
    ),
    ("abort", {"scopes": [{"scope": "SCOPE", "leases": ["1"]}]}, "leases"),
    ("renew", {"scopes": [{"scope": "SCOPE"}]}, "leases"),
    (
        "delete",
        {"scopes": [{"scope": "SCOPE", "keys": ["a"], "generations": [1, 2]}]},
        "generations",
    ),
    ("clear", {"scopes": "SCOPE"}, "scopes"),
    ("unpin", {"pins": [0]}, "pins"),
    ("initialize", {"scopes": [{"scope": "SCOPE", "slots": 0}]}, "slots"),
    ("initialize", {"scopes": [{"scope": "SCOPE", "slots": 8, "slot_bytes": -1}]}, "slot_bytes"),
    ("inspect", {"scope": "SCOPE", "slots": [10**6]}, "slots"),
    ("drain", {}, "enabled"),
)


class LimitCases:
    """Limits of size and number, and validation."""

    @covers("MD-LIM-1", levels=[Level.FAULTS], needs=[Need.NATIVE])
    def test_keys_and_batches_at_their_limits(self, context: ServerContext) -> None:
        """The longest key, the largest batch and the most scopes are served.

        One more is refused by name.
        """
        limits, scope = context.server_info.limits, context.v2_scope(8)
        longest = context.keys(1)[0][:16] + "k" * (limits.key_bytes - 16)
        scope.store([longest])
        if scope.live([longest, longest[:-1]]) != [True, False]:
            raise Violation(
                "MD-LIM-1",
                f"a key of {limits.key_bytes} bytes, as the limits allow, is stored and not found, "
                f"or aliases",
            )
        self._too_much(
            context,
            [LookupScope(scope=scope.name, keys=["a", longest + "k"])],
            (422,),
            "keys[1]",
            "a key over the limit",
        )
        # Short keys, so that the limit of keys is met before that of the body.
        most = [f"{i:x}" for i in range(limits.keys)]
        if len(b'"12345",') * limits.keys < limits.body_bytes:
            if scope.live(most) != [False] * limits.keys:
                raise Violation(
                    "MD-LIM-1",
                    f"a lookup of {limits.keys} keys, as the limits allow, finds some that nobody "
                    f"stored",
                )
            halves = [
                LookupScope(scope=scope.name, keys=most[: limits.keys // 2]),
                LookupScope(scope=scope.name, keys=[*most[limits.keys // 2 :], "x"]),
            ]
            self._too_much(context, halves, (413,), "keys", "a key more than the limit")
        alike = LookupScope(scope=scope.name, keys=["a"])
        expect(
            context.native.send("/v2/lookup", Lookup(scopes=[alike] * limits.scopes)),
            "MD-LIM-1",
            200,
            because="as many scopes as allowed",
        )
        self._too_much(
            context, [alike] * (limits.scopes + 1), (413,), "scopes", "a scope more than the limit"
        )

    @covers("MD-LIM-1", "MD-HTTP-1", levels=[Level.FAULTS], needs=[Need.NATIVE])
    def test_a_body_over_the_limit(self, context: ServerContext) -> None:
        """A body of more bytes than the limit is refused with 413, and the server goes on.

        One just below is read.
        """
        limits, scope = context.server_info.limits, context.v2_scope(8)
        body = b'{"scopes": []' + b" " * (limits.body_bytes - 14) + b"}"
        expect(
            context.http.send("POST", "/v2/lookup", body),
            "MD-LIM-1",
            200,
            because=f"a body of {len(body)} bytes, as the limits allow",
        )
        try:
            reply = context.http.send("POST", "/v2/lookup", body + b" " * 1024)
        except Violation as violation:
            # A server may close the connection instead of reading what it refuses.
            if "BrokenPipe" not in str(violation) and "ConnectionReset" not in str(violation):
                raise
        else:
            expect(reply, "MD-LIM-1", 413, because=f"a body of {len(body) + 1024} bytes")
        scope.live(context.keys(1))

    @covers("MD-LIM-1", levels=[Level.FAULTS], needs=[Need.NATIVE])
    def test_a_page_longer_than_its_slot(self, context: ServerContext) -> None:
        """A commit of more bytes than a slot has is refused by name, and the lease stays."""
        scope, keys = context.v2_scope(8), context.keys(2)
        leases = scope.reserve(keys, lease_seconds=20.0).leases
        part = CommitScope(
            scope=scope.name, leases=leases, lengths=[1, scope.slot_bytes + 1], checksums=[1, 1]
        )
        reply = context.native.send("/v2/commit", Commit(scopes=[part]))
        expect(
            reply,
            "MD-LIM-1",
            422,
            because=f"{scope.slot_bytes + 1} bytes in a slot of {scope.slot_bytes}",
        )
        refused(reply, "MD-LIM-1", "a page longer than its slot", names="lengths[1]")
        if any(scope.live(keys)) or not all(scope.commit(leases)):
            raise Violation(
                "MD-LIM-1",
                "a commit was refused for one page's length, and something of it was done",
            )

    @covers("MD-REQ-6", levels=[Level.FAULTS], needs=[Need.NATIVE])
    def test_wrong_fields(self, context: ServerContext) -> None:
        """Missing, wrong and unknown fields are refused with 422 and a Problem that names them."""
        scope = context.v2_scope(8)
        for operation, body, field in WRONG:
            text = msgspec.json.encode(body).replace(b"SCOPE", scope.name.encode())
            reply = context.http.send("POST", f"/v2/{operation}", text)
            expect(reply, "MD-REQ-6", 422, because=f"{field} is wrong")
            refused(reply, "MD-REQ-6", f"{operation} of {text.decode()}", names=field)
            _problem(reply)

    @covers("MD-REQ-6", "MD-HTTP-1", levels=[Level.FAULTS], needs=[Need.NATIVE])
    def test_unreadable_bodies_and_other_types(self, context: ServerContext) -> None:
        """Unreadable bodies are refused with 400, other content types with 415.

        Unknown routes with 404, all as Problems.
        """
        for body in (b"", b"{", b"\xff\xff", b"{'a': 1}", b'{"scopes": [}'):
            reply = context.http.send("POST", "/v2/lookup", body)
            _problem(expect(reply, "MD-REQ-6", 400, because=f"the body {body!r}"))
        reply = context.http.send("POST", "/v2/lookup", b"\xc1", content_type=MSGPACK)
        expect(reply, "MD-REQ-6", 400, because="a body that is no msgpack")
        reply = context.http.send(
            "POST", "/v2/lookup", b"scopes=", content_type="application/x-www-form-urlencoded"
        )
        _problem(expect(reply, "MD-REQ-6", 415, because="a form"))
        _problem(
            expect(
                context.http.send("POST", "/v2/nonsense", b"{}"),
                "MD-REQ-6",
                404,
                because="a route that does not exist",
            )
        )

    def _too_much(
        self,
        context: ServerContext,
        scopes: list[LookupScope],
        statuses: tuple[int, ...],
        field: str,
        what: str,
    ) -> None:
        reply = context.native.send("/v2/lookup", Lookup(scopes=scopes))
        expect(reply, "MD-LIM-1", *statuses, because=what)
        refused(reply, "MD-LIM-1", what, names=field)


def _problem(reply: Reply) -> None:
    try:
        problem = decode(reply.body, Problem)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Violation("MD-REQ-6", f"{reply} is no Problem: {error}") from error
    if not problem.code or not problem.message:
        raise Violation("MD-REQ-6", f"{reply}: a Problem without a code or a message")
