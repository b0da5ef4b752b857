"""History of a server: time series of its counters, and the slow log."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.access import Tokens
from hicache_metadata_server.core.limits import request_size
from hicache_metadata_server.core.scope import Totals
from hicache_metadata_server.http.metrics import (
    MINUTES,
    SECONDS,
    SLOW_KEPT,
    Counters,
    SampleRing,
    SlowLog,
    quantile,
)
from hicache_metadata_server.protocol import History, SlowCall
from tests.metadata_server.http_calls import NOW, Clock, running

SCOPE = {"scopes": [{"scope": "0:kv", "slots": 8}]}
BOUNDS = (0.001, 0.01, math.inf)


def counters(time, requests=0, by_bucket=None, totals=None, refused=0, failed=0):
    by_bucket = by_bucket or (requests, requests, requests)
    totals = totals or Totals(live=requests)
    return Counters(time, requests, refused, failed, BOUNDS, by_bucket, totals)


def ring(*readings, step=1.0):
    """A ring that was given counters, as `(time, requests)` or made by `counters`."""
    made = SampleRing(step, SECONDS if step == 1.0 else MINUTES)
    for one in readings:
        made.update(one if isinstance(one, Counters) else counters(*one))
    return made


def test_a_sample_counts_the_requests_between_two_readings():
    first = Totals(live=5, free=3, hits=100, misses=50, evicted=7)
    last = Totals(live=6, leased=1, quarantined=1, hits=130, misses=60, evicted=9)
    found = ring(
        counters(100.0, 10, (6, 9, 10), first, 1, 1), counters(101.5, 30, (6, 29, 30), last, 4, 2)
    ).series(0.0)
    assert (found.times, found.spans) == ([101.5], [1.5])
    assert (found.requests, found.refused, found.failed) == ([20], [3], [1])
    assert (found.hits, found.misses, found.evicted) == ([30], [10], [2])
    assert (found.live, found.leased, found.quarantined, found.free) == ([6], [1], [1], [0])
    # All 20 lie between 1 and 10 ms.
    assert found.median_seconds == [pytest.approx(0.0055)]
    assert found.p99_seconds == [pytest.approx(0.00991)]


def test_seconds_begin_on_whole_ones_however_late_the_readings_are():
    found = ring((10.04, 0), (11.09, 1), (11.9, 2), (12.0, 3), (13.07, 6), (16.5, 10)).series(0.0)
    assert found.requests == [1, 2, 3, 4]
    assert found.times == [11.09, 12.0, 13.07, 16.5]


def test_a_quiet_second_has_no_times_to_answer():
    found = ring((1.0, 5), (2.0, 5)).series(0.0)
    assert (found.requests, found.median_seconds, found.p99_seconds) == ([0], [None], [None])
    # The first answers fill buckets that were not there.
    empty = Counters(1.0, 0, 0, 0, (), (), Totals())
    assert ring(empty, (2.0, 4)).series(0.0).median_seconds == [0.0005]


@pytest.mark.parametrize(("step", "kept"), [(1.0, 600), (60.0, 1440)])
def test_rings_keep_ten_minutes_and_a_day(step, kept):
    last = int(step) * (kept + 3)
    filled = ring(*((float(at), at) for at in range(0, last + 1, int(step) // 2 or 1)), step=step)
    found = filled.series(0.0)
    assert (len(found.times), found.times[-1]) == (kept, float(last))
    assert set(found.requests) == {int(step)}
    assert filled.series(last - step).times == [last]
    assert filled.series(last).times == []


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values, share):
    bounds = (0.001, 0.01, 0.1, 1.0, 5.0, math.inf)
    found = quantile(share, bounds, [sum(value <= bound for value in values) for bound in bounds])
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    end = next(bound for bound in bounds if exact <= bound)
    begin = max((bound for bound in (0.0, *bounds) if bound < end), default=0.0)
    # What is beyond the last bound is found as that bound.
    assert begin <= found <= (end if end < math.inf else begin) + 1e-9


def call(seconds, time=0.0, route="/v2"):
    return SlowCall(time=time, route=route, status=200, seconds=seconds, entries=0, scopes=0)


def offer(slow_log, seconds, time):
    """As the application does it: calls that are not slower than the floor are not added."""
    if seconds > slow_log.floor:
        slow_log.add(call(seconds, time))


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50)), max_size=400))
def test_the_slowest_of_the_last_hour_are_those_of_all_calls(calls):
    slow_log, now = SlowLog(), 0.0
    made = []
    for minutes, milliseconds in calls:
        now += minutes if minutes > 60 else minutes / 10
        slow_log.rotate(60 * now)
        offer(slow_log, milliseconds / 1000, 60 * now)
        made.append((milliseconds / 1000, 60 * now))
    found = slow_log.calls(60 * now)
    # An hour back to the beginning of its minute at most.
    recent = sorted((seconds for seconds, time in made if time > 60 * now - 3600), reverse=True)
    assert [call.seconds for call in found] == recent[:SLOW_KEPT]
    assert all(60 * now - 3600 < call.time <= 60 * now for call in found)


TWO = [p.LookupScope(scope="0:kv", keys=["a", "b"]), p.LookupScope(scope="0:mamba", keys=["c"])]


@pytest.mark.parametrize(
    ("request_", "size"),
    [
        (p.Lookup(scopes=TWO), (3, 2, "0:kv")),
        (p.Renew(scopes=[p.LeaseScope(scope="1:kv", leases=[1, 2])]), (2, 1, "1:kv")),
        (p.Clear(scopes=["0:kv", "1:kv"]), (0, 2, "0:kv")),
        (p.Inspect(scope="0:kv", keys=["a"], slots=[1, 2]), (3, 1, "0:kv")),
        (p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=1)]), (0, 1, "0:kv")),
        (p.SglangReserve(keys=[("a", ""), ("b", "a")]), (2, 0, "")),
        (p.SglangConfirm(written_keys_to_confirm=[("a", 1)], pages_to_release=[2]), (2, 0, "")),
        (None, (0, 0, "")),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_size_of_a_request(request_, size):
    assert request_size(request_) == size


async def fetch_history(caller, query="", **options):
    reply = await caller.send("GET", "/v2/history", query=query, **options)
    assert reply.status == 200
    kind = options.get("content_type", p.JSON)
    assert reply.headers["content-type"] == kind
    return p.decode(reply.body, History, kind)


async def test_the_server_tells_its_past():
    clock = Clock()
    async with running(clock=clock) as caller:
        recorder = caller.app.recorder
        recorder.sample()
        await caller.post("/v2/initialize", SCOPE)
        await caller.store("0:kv", ["a", "b"])
        asked = {"scopes": [{"scope": "0:kv", "keys": ["a", "x", "b"]}]}
        await caller.post("/v2/lookup", asked, headers={"X-Request-Id": "e\x007 <i>"})
        await caller.post("/v2/lookup", {"scopes": []}, content_type="text/plain")
        clock.now += 1
        recorder.sample()
        clock.now += 0.5
        instance = (await caller.send("GET", "/v2")).json["instance"]
        found = await fetch_history(caller)
        assert (found.instance, found.started, found.now) == (instance, NOW, NOW + 1.5)
        seconds = found.seconds
        assert (seconds.times, seconds.requests) == ([NOW + 1], [5])
        assert (seconds.refused, seconds.failed) == ([1], [0])
        assert (seconds.hits, seconds.misses, seconds.live, seconds.free) == ([2], [1], [2], [6])
        assert 0 < seconds.median_seconds[0] <= seconds.p99_seconds[0]
        assert found.minutes.times == []
        assert (await fetch_history(caller, f"after={NOW + 1}")).seconds.times == []
        assert (await fetch_history(caller, content_type=p.MSGPACK)).seconds == seconds
        for no_time in ("x", "nan", "inf"):
            reply = await caller.send("GET", "/v2/history", query=f"after={no_time}")
            assert (reply.status, reply.json["field"]) == (422, "after")
        slow = {call.route: call for call in found.slowest if call.status == 200}
        assert set(slow) == {"/v2/initialize", "/v2/reserve", "/v2/commit", "/v2/lookup", "/v2"}
        call = slow["/v2/lookup"]
        assert (call.entries, call.scopes, call.scope) == (3, 1, "0:kv")
        assert call.request_id == "e_7__i_"
        assert slow["/v2/commit"].entries == 2
        assert sorted(found.slowest, key=lambda call: -call.seconds) == found.slowest


async def test_the_page_is_for_everybody_and_holds_nothing():
    """The same bytes with tokens and without, before and after there is data."""
    paths, pages = ("/", "/page/main.js", "/page/style.css", "/page/icon.svg"), []
    for tokens in (None, Tokens({"r": p.Token.READ})):
        async with running(tokens=tokens) as caller:
            for _ in range(2):
                pages.append([await caller.send("GET", path) for path in paths])
                await caller.post("/v2/initialize", SCOPE)
    assert pages.count(pages[0]) == 4
    for reply in pages[0]:
        assert reply.status == 200
        policy = reply.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
        assert "style-src 'self'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
    kinds = [reply.headers["content-type"].partition(";")[0] for reply in pages[0]]
    assert kinds == ["text/html", "text/javascript", "text/css", "image/svg+xml"]


async def test_the_page_is_sent_once():
    async with running() as caller:
        tag = (await caller.send("GET", "/")).headers["etag"]
        again = await caller.send("GET", "/", headers={"If-None-Match": tag})
        assert (again.status, again.body) == (304, b"")
        for path in ("/page/", "/page/../app.py", "/page/__init__.py", "/page/main.js/x"):
            reply = await caller.send("GET", path)
            assert (reply.status, reply.json["code"]) == (404, "unknown_route"), path
