"""Requests that mean nothing, by both parts: refused by name, and nothing done."""

from __future__ import annotations

import msgspec

from hicache_metadata_server import protocol as p
from tests.metadata_server.protocol.peer import keys_of, peer_on

UNREADABLE = [b"", b"{", b"{'keys': []}", b'{"keys": [}', b"\xff\xfe\x00", b"keys=a&keys=b"]
# A wrong field comes first.
UNREADABLE += [b'{"keys": 7, "num_pages": "x", "written_keys_to_confirm": 7, ']
NO_OBJECTS = [b"null", b"[]", b"7", b'"keys"']
RESERVE, CONFIRM, RELEASE = (
    "reserve_and_allocate_page_indices",
    "written_keys_to_confirm",
    "pages_to_release",
)
KEYED = ("exists", "get_page_indices", "delete_keys", RESERVE)
COMPATIBLE = [
    # A text is no list of characters.
    *[
        (operation, body, "keys")
        for operation in KEYED
        for body in ({}, {"keys": [{}]}, {"keys": "abc"}, {"keys": ""}, {"keys": None})
    ],
    *[("exists", {"keys": value}, "keys") for value in ([7], ["a", None], [["a", ""]], [""])],
    *[
        (RESERVE, {"keys": value}, "keys")
        for value in (["ab"], [["a"]], [["a", "", "b"]], [[1, ""]], [["", ""]], [["a", None]])
    ],
    (RESERVE, {"keys": [["a", ""], ["b", 1]]}, "keys[1][1]"),
    ("confirm_write", {CONFIRM: [["a", 1], ["b", -1]]}, f"{CONFIRM}[1][1]"),
    *[
        ("confirm_write", {CONFIRM: value}, CONFIRM)
        for value in ([["a"]], [["a", "0"]], [[0, "a"]], ["a0"])
    ],
    *[("confirm_write", {RELEASE: value}, RELEASE) for value in (["0"], 0, [True])],
    ("clear", {"namespace": 7}, "namespace"),
    ("clear", {"namespace": "a b"}, "namespace"),
    ("exists", {"keys": [], "namespace": ["kv"]}, "namespace"),
    ("initialize", {}, "num_pages"),
]
S = "0:kv"
NATIVE = [
    ("lookup", {}, "scopes"),
    ("lookup", {"scopes": {}}, "scopes"),
    ("lookup", {"scopes": [{"keys": []}]}, "scopes[0].scope"),
    *[
        ("lookup", {"scopes": [{"scope": S, "keys": []}, {"scope": name}]}, "scopes[1].scope")
        for name in (
            *("kv", ":kv", "-1:kv", "1.5:kv", "0:", "0:a b", "0:a/b", "0:kv\n", "1234567890:kv"),
            "0:" + "n" * 129,
        )
    ],
    ("lookup", {"scopes": [{"scope": S, "keys": "abc"}]}, "scopes[0].keys"),
    ("lookup", {"scopes": [{"scope": S, "keys": [""]}]}, "scopes[0].keys[0]"),
    ("lookup", {"scopes": [{"scope": S, "keys": ["a", 7]}]}, "scopes[0].keys[1]"),
    ("lookup", {"scopes": [{"scope": S, "keys": [], "more": 1}]}, "scopes[0].more"),
    ("lookup", {"scopes": [], "touched": True}, "touched"),
    *[
        ("reserve", {"scopes": [{"scope": S, "keys": ["a", "b"], "prefixes": prefixes}]}, field)
        for prefixes, field in (
            (["a"], "scopes[0].prefixes"),
            (["a", "x" * 2000], "scopes[0].prefixes[1]"),
        )
    ],
    ("reserve", {"scopes": [], "owner": "x" * 2000}, "owner"),
    ("reserve", {"scopes": [], "lease_seconds": 0}, "lease_seconds"),
    ("reserve", {"scopes": [], "lease_seconds": "1"}, "lease_seconds"),
    *[
        (
            "commit",
            {"scopes": [{"scope": S, "leases": [1], "lengths": [1], "checksums": [1]} | wrong]},
            f"scopes[0].{field}",
        )
        for wrong, field in (
            ({"lengths": []}, "lengths"),
            ({"lengths": [0]}, "lengths[0]"),
            ({"checksums": [-1]}, "checksums[0]"),
            ({"leases": [0]}, "leases[0]"),
        )
    ],
    ("abort", {"scopes": [{"scope": S, "leases": ["1"]}]}, "scopes[0].leases[0]"),
    ("renew", {"scopes": [{"scope": S}]}, "scopes[0].leases"),
    (
        "delete",
        {"scopes": [{"scope": S, "keys": ["a"], "generations": [1, 2]}]},
        "scopes[0].generations",
    ),
    ("delete", {"scopes": [], "owner": "x" * 1025}, "owner"),
    ("clear", {"scopes": S}, "scopes"),
    ("clear", {"scopes": [], "owner": "x" * 1025}, "owner"),
    ("removals", {"scopes": [{"scope": S, "cursor": "9" * 129}]}, "scopes[0].cursor"),
    *[
        ("initialize", {"scopes": [{"scope": "0:a", "slots": 8} | wrong]}, f"scopes[0].{field}")
        for wrong, field in (
            ({"slots": 0}, "slots"),
            ({"slot_bytes": -1}, "slot_bytes"),
            ({"slot_bytes": 2**63}, "slot_bytes"),
            ({"identity": "x" * 5000}, "identity"),
        )
    ],
    (
        "initialize",
        {"scopes": [{"scope": "0:a", "slots": 8}], "earlier_lease_seconds": [1.0, 1.0]},
        "earlier_lease_seconds",
    ),
    # Text that a terminal obeys, hides or turns around, too.
    *[
        ("describe", {"scope": S, "model": model}, "model")
        for model in (
            *("", "m" * 513, "a\nb", "line\n", "\x1b[31mred", "nul\0", "\x9b1m", "\u200b"),
            *("\u202eb", None, 7),
        )
    ],
    ("inspect", {"scope": S, "slots": [8]}, "slots[0]"),
    ("drain", {}, "enabled"),
]
PATHS = ["/abc/exists", "/1.5/exists", "/1e3/exists", "/0x1/exists", "/-1/exists"]
ROUTES = ["/0/nonsense", "/exists", "/0/exists/more", "/0/%00", "/v2/nonsense", "/v3"]
LIMITS = {"keys": 10, "scopes": 3, "key_bytes": 600, "body_bytes": 4096}


async def test_bodies_of_the_compatible_part_that_cannot_be_read(peer):
    """MD-REQ-1."""
    await peer.make(4)
    for operation in ("exists", "initialize", RESERVE, "confirm_write"):
        for body in (*UNREADABLE, *NO_OBJECTS, b"[" * 2000):
            reply = await peer.caller.send("POST", f"/0/{operation}", body)
            assert reply.status in ((400,) if body in UNREADABLE else (400, 422)), (body, reply)
            assert reply.json["message"]
        # What a form of any site can send.
        reply = await peer.caller.send("POST", f"/0/{operation}", b"{}", content_type="text/plain")
        assert (reply.status, reply.json["code"]) == (415, "media_type")


async def test_fields_of_the_compatible_part_that_are_missing_or_wrong(peer):
    """MD-REQ-2 and MD-REQ-3."""
    await peer.make(8)
    slots = await peer.put(keys_of(4))
    for operation, body, field in COMPATIBLE:
        refused = await peer.sglang(operation, 422, **body)
        assert refused["field"].startswith(field), (operation, body, refused)
    assert await peer.indices(keys_of(4)) == slots


async def test_paths_that_lead_nowhere(peer):
    """MD-REQ-4: no route, no rank, or no POST."""
    for path in (*PATHS, *ROUTES):
        reply = await peer.caller.post(path, {"keys": ["a"]})
        assert reply.status in ((404,) if path in ROUTES else (404, 422)), (path, reply)
        assert reply.json["message"]
    for path in ("/0/exists", "/v2/lookup"):
        reply = await peer.caller.send("GET", path)
        assert reply.status in (404, 405)
        assert reply.json["message"]


async def test_fields_of_the_native_part_that_are_missing_or_wrong(peer):
    """MD-REQ-6: in both content types."""
    await peer.initialize(8)
    for content_type, pack in ((p.JSON, msgspec.json.encode), (p.MSGPACK, msgspec.msgpack.encode)):
        for operation, body, field in NATIVE:
            reply = await peer.caller.send(
                "POST", f"/v2/{operation}", pack(body), content_type=content_type
            )
            assert reply.status == 422, (operation, body, reply)
            problem = p.decode(reply.body, p.Problem, content_type)
            assert problem.field == field, (operation, body, problem)
            assert problem.code
            assert problem.message


async def test_bodies_of_the_native_part_that_cannot_be_read(peer):
    """MD-REQ-6."""
    await peer.initialize(8)
    for body in UNREADABLE:
        reply = await peer.caller.send("POST", "/v2/lookup", body)
        assert (reply.status, bool(reply.json["code"])) == (400, True), (body, reply)
    reply = await peer.caller.send("POST", "/v2/lookup", b"\xc1", content_type=p.MSGPACK)
    assert reply.status == 400
    reply = await peer.caller.send("POST", "/v2/lookup", b"scopes=", content_type="text/plain")
    assert (reply.status, reply.json["code"]) == (415, "media_type")
    # msgpack has no such number.
    part = {"scope": S, "leases": [1], "lengths": [1], "checksums": [2**64]}
    reply = await peer.caller.post("/v2/commit", {"scopes": [part]})
    assert (reply.status, reply.json["field"]) == (422, "scopes[0].checksums[0]")


async def test_limits_are_what_the_server_says(tmp_path):
    """MD-LIM-1: up to them a request is served, one more is refused by name."""
    async with peer_on(f"sqlite:///{tmp_path}/m.db", **LIMITS) as peer:
        await peer.initialize(12)
        told = (await peer.call("/v2")).limits
        assert {name: getattr(told, name) for name in LIMITS} == LIMITS
        longest = "k" * 600
        await peer.store([longest])
        assert await peer.live([longest, longest[:-1]]) == [True, False]

        def asked(*counts, key="k"):
            parts = [
                p.LookupScope(scope=S, keys=[f"{key}{number}" for number in range(count)])
                for count in counts
            ]
            return p.Lookup(scopes=parts)

        for counts in ((10,), (4, 6), (1, 1, 1)):
            await peer.call("/v2/lookup", asked(*counts))
        await peer.refused("/v2/lookup", asked(1, key=longest), 422, "scopes[0].keys[0]")
        await peer.refused("/v2/lookup", asked(11), 413, "scopes[0].keys")
        await peer.refused("/v2/lookup", asked(5, 6), 413, "scopes[1].keys")
        await peer.refused("/v2/lookup", asked(1, 1, 1, 1), 413, "scopes")
        keys = keys_of(11)
        for operation in ("exists", "get_page_indices", "delete_keys"):
            assert (await peer.sglang(operation, 413, keys=keys))["field"] == "keys"
        await peer.sglang(RESERVE, 413, keys=[[key, ""] for key in keys])
        await peer.sglang("exists", 422, keys=[f"{longest}k"])
        body = b'{"scopes": []' + b" " * (LIMITS["body_bytes"] - 14) + b"}"
        for sent, status in ((body, 200), (body + b" ", 413)):
            for told in ({"content-length": f"{len(sent)}"}, {}):
                reply = await peer.caller.send("POST", "/v2/lookup", sent, headers=told, pieces=7)
                assert reply.status == status


async def test_a_page_longer_than_its_slot(peer):
    """MD-LIM-1: the whole commit is refused, and the leases stay."""
    await peer.initialize(8, slot_bytes=4096)
    leases = (await peer.lease(["a", "b"])).leases
    part = p.CommitScope(scope=S, leases=leases, lengths=[1, 4097], checksums=[1, 1])
    await peer.refused("/v2/commit", p.Commit(scopes=[part]), 422, "scopes[0].lengths[1]")
    assert await peer.live(["a", "b"]) == [False, False]
    assert await peer.commit(leases, [1, 4096]) == [True, True]
