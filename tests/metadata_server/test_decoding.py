"""Decoding of bodies: no request waits for two long ones."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.http.decoding import BodyDecoder
from tests.metadata_server.http_calls import running


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
        body = msgspec.json.encode({"scopes": [{"scope": "0:kv", "keys": ["k" * 400_000, None]}]})
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
