"""Malformed requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import refused

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext

UNREADABLE: Final = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b'"keys"',
    b"{'keys': []}",
    b'{"keys": [}',
    b"\xff\xfe\x00",
    b"keys=a&keys=b",
    b"[" * 2000,
)

WRONG: Final[tuple[tuple[str, dict[str, Any], str], ...]] = (
    ("exists", {}, "keys"),
    ("exists", {"keys": None}, "keys"),
    ("exists", {"keys": 7}, "keys"),
    ("exists", {"keys": {"a": 1}}, "keys"),
    ("exists", {"keys": [7]}, "keys"),
    ("exists", {"keys": ["a", None]}, "keys"),
    ("exists", {"keys": [["a", ""]]}, "keys"),
    ("get_page_indices", {}, "keys"),
    ("get_page_indices", {"keys": [1.5]}, "keys"),
    ("delete_keys", {}, "keys"),
    ("delete_keys", {"keys": [{}]}, "keys"),
    ("reserve_and_allocate_page_indices", {}, "keys"),
    ("reserve_and_allocate_page_indices", {"keys": ["ab"]}, "keys"),
    ("reserve_and_allocate_page_indices", {"keys": [["a"]]}, "keys"),
    ("reserve_and_allocate_page_indices", {"keys": [["a", "", "b"]]}, "keys"),
    ("reserve_and_allocate_page_indices", {"keys": [[1, ""]]}, "keys"),
    ("confirm_write", {"written_keys_to_confirm": [["a"]]}, "written_keys_to_confirm"),
    ("confirm_write", {"written_keys_to_confirm": [["a", "0"]]}, "written_keys_to_confirm"),
    ("confirm_write", {"written_keys_to_confirm": [[0, "a"]]}, "written_keys_to_confirm"),
    ("confirm_write", {"pages_to_release": ["0"]}, "pages_to_release"),
    ("confirm_write", {"pages_to_release": 0}, "pages_to_release"),
    ("clear", {"namespace": 7}, "namespace"),
    ("exists", {"keys": [], "namespace": ["kv"]}, "namespace"),
    ("initialize", {}, "num_pages"),
)

VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "x",
    "\u0000",
    [],
    [[]],
    [None],
    {},
    {"a": [1]},
    [["a", ""]],
    [["a", 0]],
    ["a"],
    [-1],
    "kv",
    [[["a"]]],
)
FIELDS: Final = (
    "keys",
    "namespace",
    "num_pages",
    "written_keys_to_confirm",
    "pages_to_release",
    "rank",
    "extra",
)
OPERATIONS: Final = (
    "initialize",
    "exists",
    "reserve_and_allocate_page_indices",
    "confirm_write",
    "get_page_indices",
    "delete_keys",
    "nonsense",
)


class MalformedCases:
    """Bodies and paths that mean nothing."""

    @covers("MD-REQ-1", "MD-HTTP-1", levels=[Level.FAULTS])
    def test_unreadable_bodies(self, context: ServerContext) -> None:
        """Bodies that are no JSON, or no object, are refused in JSON."""
        scope = context.scope(4)
        for operation in (
            "exists",
            "initialize",
            "reserve_and_allocate_page_indices",
            "confirm_write",
            "get_page_indices",
        ):
            for body in UNREADABLE:
                reply = context.http.send("POST", f"/{scope.rank}/{operation}", body)
                refused(reply, "MD-REQ-1", f"the body {body[:20]!r} of {operation}")

    @covers("MD-REQ-2", levels=[Level.FAULTS])
    def test_fields_that_are_missing_or_wrong(self, context: ServerContext) -> None:
        """Fields that are missing or of a wrong type are refused by name, and do nothing."""
        scope, keys = context.scope(8), context.keys(4)
        slots = scope.store(keys)
        for operation, body, field in WRONG:
            refused(
                scope.post(operation, **body),
                "MD-REQ-2",
                f"{operation} of {json.dumps(body)}",
                names=field,
            )
        if (now := scope.indices(keys)) != slots:
            raise Violation("MD-REQ-2", f"slots {slots} became {now} by requests that were refused")

    @covers("MD-REQ-3", levels=[Level.FAULTS])
    def test_a_text_for_keys(self, context: ServerContext) -> None:
        """A text for a list of keys is refused, and not taken for a list of characters."""
        scope = context.scope(8)
        for operation in (
            "exists",
            "get_page_indices",
            "delete_keys",
            "reserve_and_allocate_page_indices",
        ):
            for text in ("abc", context.keys(1)[0], ""):
                refused(
                    scope.post(operation, keys=text),
                    "MD-REQ-3",
                    f"keys {text!r} of {operation}",
                    names="keys",
                )

    @covers("MD-REQ-4", levels=[Level.FAULTS])
    def test_paths_that_lead_nowhere(self, context: ServerContext) -> None:
        """Ranks that are no numbers and routes that do not exist are refused in JSON."""
        keys = {"keys": context.keys(1)}
        for path in (
            "/abc/exists",
            "/1.5/exists",
            "/1e3/exists",
            "/0x1/exists",
            "/0/nonsense",
            "/exists",
            "/0/exists/more",
            "/0/%00",
        ):
            refused(context.http.post(path, keys), "MD-REQ-4", f"the path {path}")
        reply = context.http.get("/0/exists")
        refused(reply, "MD-REQ-4", "GET for a route that takes POST")

    @covers("MD-REQ-5", "MD-HTTP-1", levels=[Level.FAULTS])
    def test_random_requests(self, context: ServerContext) -> None:
        """Random bodies of random fields never break the server, and cost nobody a page."""
        scope, keys = context.scope(64), context.keys(16)
        slots = scope.store(keys)
        for _ in range(max(40, 3 * context.profile.histories)):
            fields = context.chance.sample(FIELDS, context.number(0, 4))
            body = {
                "namespace": f"{scope.namespace}-other",
                **{field: context.chance.choice(VALUES) for field in fields},
            }
            rank = context.chance.choice(
                (str(scope.rank), str(scope.rank), "0", "-1", "x", "99999999999999999999")
            )
            reply = context.http.post(f"/{rank}/{context.chance.choice(OPERATIONS)}", body)
            if reply.status >= 500:
                raise Violation("MD-REQ-5", f"a request breaks the server: {reply}")
        if (now := scope.indices(keys)) != slots:
            raise Violation(
                "MD-REQ-5", f"slots {slots} became {now} by random requests about other scopes"
            )
