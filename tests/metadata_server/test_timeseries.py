"""History of a server, as its route tells it: time series of its counters, and the slow log; and
files of the status page."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.access import Tokens
from hicache_metadata_server.http import asgi
from hicache_metadata_server.http.metrics import SLOW_KEPT
from hicache_metadata_server.protocol import History
from tests.metadata_server.http_calls import NOW, Clock, of_keys, running

SCOPE = {"scopes": [{"scope": "0:kv", "slots": 8}]}


class Past:
    """A server, its time, and the time that each of its calls takes."""

    def __init__(self, caller, clock):
        self.caller, self.clock, self.took, self._timer = caller, clock, 0.003, 0.0

    def perf_counter(self):
        self._timer += self.took
        return self._timer

    async def call(self, *seconds):
        """Requests that take so long."""
        for self.took in seconds:
            assert (await self.caller.send("GET", "/v2")).status == 200

    def sample(self, time):
        """Read the counters at a time since the start, as the server does each second."""
        self.clock.now = NOW + time
        self.caller.app.recorder.sample()

    async def fetch(self, query="", **options):
        reply = await self.caller.send("GET", "/v2/history", query=query, **options)
        assert reply.status == 200
        kind = options.get("content_type", p.JSON)
        assert reply.headers["content-type"] == kind
        return p.decode(reply.body, History, kind)


@pytest.fixture
async def past(monkeypatch):
    clock = Clock()
    async with running(clock=clock) as caller:
        made = Past(caller, clock)
        made.sample(0.0)
        monkeypatch.setattr(asgi, "time", SimpleNamespace(perf_counter=made.perf_counter))
        yield made


async def test_a_sample_counts_what_has_happened_since_the_one_before(past):
    """Seconds begin on whole ones, however late the readings are."""
    caller = past.caller
    await caller.post("/v2/initialize", SCOPE)
    await caller.store("0:kv", list("abcdefg"))
    past.sample(1.09)
    await caller.reserve("0:kv", ["h", "i"])
    past.sample(1.9)
    await caller.post("/v2/lookup", of_keys("0:kv", ["b", "x", "c", "y", "d"]))
    await caller.post("/v2/lookup", of_keys("0:kv", []), content_type="text/plain")
    await caller.send("GET", "/v2/nothing")
    past.sample(2.0)
    past.sample(3.07)
    instance = (await caller.send("GET", "/v2")).json["instance"]
    found = await past.fetch()
    assert (found.instance, found.started, found.now) == (instance, NOW, NOW + 3.07)
    seconds = found.seconds
    assert seconds.times == [NOW + 1.09, NOW + 2.0, NOW + 3.07]
    assert seconds.spans == pytest.approx([1.09, 0.91, 1.07])
    assert (seconds.requests, seconds.refused, seconds.failed) == ([3, 4, 0], [0, 2, 0], [0] * 3)
    assert (seconds.hits, seconds.misses, seconds.evicted) == ([0, 3, 0], [0, 2, 0], [0, 1, 0])
    assert (seconds.live, seconds.leased) == ([7, 6, 6], [0, 1, 1])
    assert (seconds.quarantined, seconds.free) == ([0, 1, 1], [1, 0, 0])
    assert seconds.median_seconds[2] is None, "nobody has asked"
    assert found.minutes.times == []
    assert (await past.fetch(f"after={NOW + 2.0}")).seconds.times == [NOW + 3.07]
    assert (await past.fetch(content_type=p.MSGPACK)).seconds == seconds
    for no_time in ("x", "nan", "inf"):
        reply = await caller.send("GET", "/v2/history", query=f"after={no_time}")
        assert (reply.status, reply.json["field"]) == (422, "after")


@pytest.mark.parametrize(
    ("seconds", "median", "p99"),
    [
        # Linear between the ends of a bucket: all lie between 2 and 5 ms here.
        ([0.003] * 20, 0.0035, 0.00497),
        ([0.003] * 19 + [0.04], 0.005 - 0.003 * 9 / 19, 0.045),
        # What is beyond the last bound is found as that bound.
        ([100.0] * 3, 5.0, 5.0),
    ],
)
async def test_times_to_answer_are_estimated_in_the_bucket_of_the_exact_ones(
    past, seconds, median, p99
):
    await past.call(*seconds)
    past.sample(1.0)
    found = (await past.fetch()).seconds
    assert found.median_seconds == [pytest.approx(median)]
    assert found.p99_seconds == [pytest.approx(p99)]


async def test_ten_minutes_of_seconds_and_a_day_of_minutes_are_kept(past):
    for number in range(2 * 1443 + 1):
        await past.call(0.003)
        past.sample(30.0 * number)
    found = await past.fetch()
    assert (len(found.seconds.times), len(found.minutes.times)) == (600, 1440)
    assert found.seconds.times[-1] == found.minutes.times[-1] == past.clock.now
    assert (set(found.seconds.requests), set(found.minutes.requests)) == ({1}, {2})


async def test_the_slowest_of_the_last_hour_are_those_of_all_calls(past):
    chance, made = random.Random(3), []
    for number in range(1500):
        step = 4000 if number % 500 == 499 else chance.choice((*[0] * 20, 6, 60, 61))
        past.sample(past.clock.now - NOW + step)
        await past.call(chance.randrange(1, 50) / 1000)
        made.append((past.took, past.clock.now))
        if number % 10 == 9:
            begin = past.clock.now - 3600
            recent = sorted((took for took, time in made if time > begin), reverse=True)
            found = [call.seconds for call in (await past.fetch()).slowest]
            assert found == pytest.approx(recent[:SLOW_KEPT])


async def test_the_slow_log_says_how_large_a_request_was(past):
    asked = {
        "/v2/initialize": (SCOPE, (0, 1, "0:kv")),
        "/v2/lookup": ({"scopes": [{"scope": "0:kv", "keys": ["a", "b"]}] * 2}, (4, 2, "0:kv")),
        "/v2/renew": ({"scopes": [{"scope": "0:kv", "leases": [1, 2]}]}, (2, 1, "0:kv")),
        "/v2/inspect": ({"scope": "0:kv", "keys": ["a"], "slots": [1, 2]}, (3, 1, "0:kv")),
        "/v2/clear": ({"scopes": ["0:kv", "1:kv"]}, (0, 2, "0:kv")),
        "/0/exists": ({"keys": ["a", "b"]}, (2, 0, "")),
    }
    for path, (body, _) in asked.items():
        await past.caller.post(path, body, headers={"X-Request-Id": "e\x007 <i>"})
    found = (await past.fetch()).slowest
    told = {call.route.replace("{rank}", "0"): call for call in found}
    assert {call.request_id for call in found} == {"e_7__i_"}
    assert {path: (call.entries, call.scopes, call.scope) for path, call in told.items()} == {
        path: size for path, (_, size) in asked.items()
    }
    assert (told["/v2/lookup"].status, told["/v2/clear"].status) == (200, 404)


async def test_the_page_is_for_everybody_and_holds_nothing():
    """The same bytes with tokens and without, before and after there is data; sent once."""
    paths, pages = ("/", "/page/main.js", "/page/style.css", "/page/icon.svg"), []
    for tokens in (None, Tokens({"r": p.Token.READ})):
        async with running(tokens=tokens) as caller:
            for _ in range(2):
                pages.append([await caller.send("GET", path) for path in paths])
                await caller.post("/v2/initialize", SCOPE)
            tag = pages[-1][0].headers["etag"]
            again = await caller.send("GET", "/", headers={"If-None-Match": tag})
            assert (again.status, again.body) == (304, b"")
            for path in ("/page/", "/page/../app.py", "/page/__init__.py", "/page/main.js/x"):
                reply = await caller.send("GET", path)
                assert (reply.status, reply.json["code"]) == (404, "unknown_route"), path
    assert pages.count(pages[0]) == 4
    for reply in pages[0]:
        policy = reply.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
        assert "style-src 'self'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
