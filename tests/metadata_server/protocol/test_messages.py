"""The messages: what they take, what they refuse, and that both content types carry them."""

from __future__ import annotations

import msgspec
import pytest

from hicache_metadata_server import protocol as p


@pytest.mark.parametrize("kind", [p.JSON, p.MSGPACK])
def test_messages_come_back_as_they_went(kind):
    found = p.FoundPages(
        slots=[0, -1], generations=[3, 0], lengths=[4096, 0], checksums=[2**64 - 1, 0]
    )
    answer = p.LookedUp(scopes=[found], pin=7, pin_seconds=1.5)
    assert p.decode(p.encode(answer, kind), p.LookedUp, kind) == answer
    request = p.Reserve(
        scopes=[p.ReserveScope(scope="0:kv", keys=["a", "ü/\0"], prefixes=["", "a"])],
        lease_seconds=2.0,
    )
    assert p.decode(p.encode(request, kind), p.Reserve, kind) == request


def test_other_content_types_carry_nothing():
    with pytest.raises(ValueError, match="text/plain"):
        p.encode(p.Clear(scopes=[]), "text/plain")
    with pytest.raises(ValueError, match="text/plain"):
        p.decode(b"{}", p.Clear, "text/plain")


def test_requests_refuse_what_they_do_not_know_and_answers_ignore_it():
    with pytest.raises(msgspec.ValidationError, match="unknown field `force`"):
        p.decode(b'{"scopes": [], "force": true}', p.Clear)
    assert p.decode(b'{"pages": [1], "new": true}', p.Cleared) == p.Cleared(pages=[1])
    assert p.decode(b'{"num_pages": 4, "new": true}', p.SglangInitialize) == p.SglangInitialize(
        num_pages=4
    )


@pytest.mark.parametrize(
    "scope",
    [
        "kv",
        ":kv",
        "-1:kv",
        "1.5:kv",
        "0:",
        "0:a b",
        "0:a/b",
        "0:" + "n" * 129,
        "1234567890:kv",
        "0:kv\n",
    ],
)
def test_names_of_scopes(scope):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"scope": scope, "keys": []}, p.LookupScope)
    assert (
        msgspec.convert({"scope": "12:kv-1f.A_0", "keys": []}, p.LookupScope).scope
        == "12:kv-1f.A_0"
    )


@pytest.mark.parametrize(
    "body", [{"keys": "abc"}, {"keys": [["a"]]}, {"keys": [["", ""]]}, {"keys": [["a", None]]}, {}]
)
def test_reservations_are_pairs(body):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(body, p.SglangReserve)


def test_routes_that_change_something_ask_for_more_than_a_read_token():
    for route in p.ROUTES.values():
        assert route.path == "/v2" or route.path.startswith("/v2/")
        if route.changes:
            assert route.method == "POST"
            assert route.token is p.Token.WRITE
