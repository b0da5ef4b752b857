"""Decoding of bodies: refusing one costs no more than a valid one of its size may, and no request
waits for two of them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.http import decoding
from hicache_metadata_server.http.decoding import CONTENT_TYPES, BodyDecoder
from hicache_metadata_server.protocol import JSON, MSGPACK
from tests.metadata_server.http_calls import running

ENCODE = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
LOOKUP = BodyDecoder(p.Lookup, CONTENT_TYPES)


def refused(body, content_type, reader=LOOKUP):
    with pytest.raises(RequestError) as caught:
        reader.decode(body, content_type)
    return caught.value.status, caught.value.problem.field


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize("wrong", [0, 255, 256, 20_000, 29_999])
def test_a_wrong_entry_of_many_is_named_and_each_is_converted_twice_at_most(
    monkeypatch, content_type, wrong
):
    keys = ["k"] * 30_000
    keys[wrong] = None
    body = ENCODE[content_type](
        {"scopes": [{"scope": "0:kv", "keys": ["k"]}, {"scope": "0:kv", "keys": keys}]}
    )
    converted, convert = [], msgspec.convert

    def counted(raw, kind):
        converted.append(sum(len(scope["keys"]) for scope in raw["scopes"]))
        return convert(raw, kind)

    monkeypatch.setattr(decoding.msgspec, "convert", counted)
    assert refused(body, content_type) == (422, f"scopes[1].keys[{wrong}]")
    assert sum(converted) < 2.1 * 30_000


COUNT, SCOPES = DEFAULTS.keys, DEFAULTS.scopes
KEYS = ["," * 100 + str(i) for i in range(COUNT // SCOPES)]
NUMBERS = [2**64 - 1] * (COUNT // SCOPES)
LENGTHS = [2**63 - 1] * (COUNT // SCOPES)
LARGEST = [
    p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=KEYS, prefixes=KEYS)] * SCOPES),
    p.Commit(
        scopes=[p.CommitScope(scope="0:kv", leases=NUMBERS, lengths=LENGTHS, checksums=NUMBERS)]
        * SCOPES
    ),
    p.Delete(scopes=[p.DeleteScope(scope="0:kv", keys=KEYS, generations=NUMBERS)] * SCOPES),
    p.SglangReserve(keys=[("k" * 30, "p" * 30)] * COUNT),
    p.SglangConfirm(written_keys_to_confirm=[("k" * 30, 2**40)] * COUNT),
]


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize("largest", LARGEST, ids=lambda largest: type(largest).__name__)
def test_the_largest_requests_within_the_limits_are_read(largest, content_type):
    reader = BodyDecoder(type(largest), CONTENT_TYPES)
    assert reader.decode(ENCODE[content_type](largest), content_type) == largest


async def test_long_bodies_are_read_one_in_a_turn_of_the_event_loop(monkeypatch):
    async with running() as caller:
        turns, read_in, ended = 0, [], False
        decode = BodyDecoder.decode

        def read(self, body, content_type):
            read_in.append(turns)
            return decode(self, body, content_type)

        async def count_turns():
            nonlocal turns
            while not ended:
                turns += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(BodyDecoder, "decode", read)
        counting = asyncio.create_task(count_turns())
        body = msgspec.json.encode({"scopes": [{"scope": "0:kv", "keys": ["k" * 600_000, None]}]})
        replies = await asyncio.gather(*(caller.send("POST", "/v2/lookup", body) for _ in range(6)))
        ended = True
        await counting
        assert {(reply.status, reply.json["field"]) for reply in replies} == {
            (422, "scopes[0].keys[1]")
        }
        assert len(read_in) == len(set(read_in)) == 6, "two were read in one turn"


def test_other_content_types_carry_nothing():
    with pytest.raises(ValueError, match="text/plain"):
        p.encode(p.Clear(scopes=[]), "text/plain")
    with pytest.raises(ValueError, match="text/plain"):
        p.decode(b"{}", p.Clear, "text/plain")
