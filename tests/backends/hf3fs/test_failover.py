"""Failover of the HTTP client: attempt plan, backoff, return to the first server."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import AdminClient
from hicache_metadata_server.client import failover as failover_module
from hicache_metadata_server.client import http_client as http_client_module
from hicache_metadata_server.client.errors import (
    BusyError,
    DrainingError,
    MetadataError,
    NoOwnerError,
    NoResponseError,
    RateLimitedError,
    RetryableError,
    ScopeMismatchError,
    UnknownScopeError,
)
from hicache_metadata_server.client.failover import (
    ATTEMPTS,
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    MIN_ATTEMPT_SECONDS,
    OWNER_SECONDS,
    ServerPool,
)
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_storage.objects import Call
from hicache_storage.spec import StorageRefusedError, StorageTimeoutError, StorageUnavailableError
from tests.backends.hf3fs.forwards import Forward, Manner
from tests.backends.hf3fs.harness import ScopeClient
from tests.backends.hf3fs.listening import listening, reply
from tests.interop.server_process import counted
from tests.support.metadata import HttpClient
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=30)

URLS = ("http://a", "http://b", "http://c")
PATIENCE_SECONDS = 60.0


def servers(urls=URLS, *, seed=0, on_failover=lambda: None):
    def never(server):
        return "it is away"

    return ServerPool(urls, rng=random.Random(seed), problem_of=never, on_failover=on_failover)


# Whose turn it is.


def test_clients_are_spread_over_the_servers():
    firsts = Counter(servers(seed=seed).first.url for seed in range(300))
    assert set(firsts) == set(URLS)
    assert min(firsts.values()) > 60


@given(
    st.integers(1, 4),
    st.lists(
        st.sampled_from([RetryableError, NoResponseError, BusyError, DrainingError]), max_size=12
    ),
)
def test_no_server_is_asked_again_before_all_others(count, failures):
    some = servers(URLS[:count] if count < 4 else (*URLS, "http://d"))
    plan = some.plan()
    visited, said = [plan.server.url], list[type[MetadataError]]()
    for failure in failures:
        said.append(failure)
        if not plan.advance(failure("")):
            break
        again = failure is BusyError
        assert (
            plan.server.url == visited[-1]
            if again
            else plan.server.url not in visited or len(set(visited)) == count
        )
        assert plan.needs_pause == (plan.server.url in visited)
        visited.append(plan.server.url)
    some.close()
    assert len(visited) <= ATTEMPTS + count - 1
    if len(visited) == len(said) and said[-1] is not DrainingError:
        assert len(visited) == ATTEMPTS + count - 1


@given(st.floats(0.001, 60.0))
def test_the_deadline_is_split_among_those_that_were_not_asked(left):
    some = servers()
    plan, parts = some.plan(), []
    for _ in URLS:
        parts.append(plan.timeout(left - sum(parts)))
        plan.advance(RetryableError(""))
    some.close()
    first, second, last = parts
    assert last == failover_module.MAX_ATTEMPT_SECONDS
    if left > 3 * MIN_ATTEMPT_SECONDS:
        assert first + second <= left * 2 / 3 + 1e-9
    assert min(first, second) >= MIN_ATTEMPT_SECONDS


def test_one_server_never_rests():
    some = servers(URLS[:1])
    some.record_failure(some.first, "gone")
    assert not some.first.in_backoff
    assert some.plan().timeout(0.5) == failover_module.MAX_ATTEMPT_SECONDS


def test_nobody_is_watched_after_the_close():
    some = servers()
    some.close()
    some.record_failure(some.first, "gone")
    assert not [thread for thread in threading.enumerate() if "probe" in thread.name]


def test_a_server_rests_longer_with_each_failure_in_a_row():
    """Up to a limit, and drawn from a range, so that not all clients come back at once; until a
    request is answered."""
    some, rests = servers(seed=1), list[float]()
    server = some.first

    def fail():
        some.record_failure(server, "gone")
        server.probe.cancel()
        rests.append(server.probe.interval)
        # Its watcher finds it ready.
        server.in_backoff = False

    for _ in range(12):
        fail()
    server.failures = 5000
    fail()
    some.record_success(server)
    fail()
    some.close()
    *growing, after_an_answer = rests
    for number, rest in enumerate(growing):
        most = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**number)
        assert most / 2 <= rest <= most
    assert growing[-1] >= MAX_BACKOFF_SECONDS / 2
    assert after_an_answer <= FIRST_BACKOFF_SECONDS


# Two addresses of one real server.


@pytest.fixture(scope="module")
def forwards(kept_server):
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Forward(kept_server.port))) for _ in range(2)]


@pytest.fixture
def ways(forwards):
    yield forwards
    for way in forwards:
        way.manner = Manner.WELL


class Client(ScopeClient):
    """A metadata client of some addresses, with a scope of its own; which server it asks first is
    known."""

    numbers = itertools.count()

    def __init__(self, ways):
        self.left = 0
        urls = [way.url for way in ways]
        metadata = HttpMetadataClient(urls, on_failover=self._count, rng=random.Random(1))
        super().__init__(metadata, f"{next(self.numbers)}:kv-test")
        [self.home] = [way for way in ways if way.url == self.metadata.endpoint]
        self.other = next(way for way in ways if way is not self.home)

    def _count(self):
        self.left += 1

    def leased(self, server):
        scopes = AdminClient(server.url).call("/v2/scopes", None, p.Scopes).scopes
        return next(status.leased for status in scopes if status.scope == self.scope)


@pytest.fixture
def client(ways):
    made = Client(ways)
    made.before = made.other.requests()
    with closing(made.metadata):
        made.metadata.refresh(Call(10))
        made.lookup()
        yield made


@pytest.mark.parametrize("manner", [Manner.REFUSES, Manner.RESETS, Manner.MUTE, Manner.HANGS])
def test_another_server_is_asked_within_the_deadline(client, manner, caplog):
    assert client.other.requests() == client.before
    client.home.manner = manner
    with caplog.at_level(logging.INFO, failover_module.__name__):
        assert client.lookup().slots == [-1]
        assert client.other.requests() > client.before
        assert (client.left, caplog.text.count("is left for")) == (1, 1)
        assert client.metadata.endpoint == f"{client.other.url}, 1 of 2 servers away"
        # While it rests, no request goes there.
        for _ in range(20):
            client.lookup()
        assert client.left == 1
        client.home.manner = Manner.WELL
        eventually(lambda: client.metadata.endpoint == client.home.url)
        asked = client.other.requests()
        client.lookup()
        assert client.other.requests() == asked
    assert caplog.text.count("serves again") == 1


def test_a_change_that_two_servers_have_seen_is_done_once(client, kept_server):
    client.home.manner = Manner.MUTE
    leased = client.reserve(["x", "y"])
    assert leased.states == [p.Reserved.LEASED] * 2
    assert (client.leased(kept_server), client.left) == (2, 1)


def test_calls_with_short_deadlines_leave_a_hanging_server_too(client):
    """None of them waits long enough to conclude something; together they do."""
    client.home.manner = Manner.HANGS

    def answered():
        try:
            return client.lookup(seconds=0.05).slots == [-1]
        except StorageTimeoutError:
            return False

    eventually(answered)
    assert client.left == 1


def test_one_slow_answer_is_no_failure(client):
    """A deadline that is too short for any server says nothing about this one."""
    with pytest.raises(StorageUnavailableError):
        client.lookup(seconds=1e-5)
    assert (client.left, client.metadata.endpoint) == (0, client.home.url)


def test_with_all_servers_away_calls_fail_and_come_back_by_themselves(client):
    client.home.manner = client.other.manner = Manner.REFUSES
    for _ in range(3):
        with pytest.raises(MetadataError):
            client.lookup()
    # The first to fail was left; there was nobody to leave the second for.
    assert client.left == 1
    client.other.manner = Manner.WELL
    client.lookup()
    assert client.metadata.endpoint.startswith(client.other.url)
    client.home.manner = Manner.WELL
    eventually(lambda: client.metadata.endpoint == client.home.url)


def aborts(server):
    """Requests to give leases back that a server has answered; leases also end by themselves."""
    metrics = HttpClient(server.url).get("/metrics").body.decode()
    return counted(metrics, "hicache_metadata_requests_total", route="/v2/abort")


def test_what_nobody_waits_for_goes_to_the_other_server_too(client, kept_server):
    leased = client.reserve(["x"])
    client.home.manner = Manner.REFUSES
    before = aborts(kept_server)
    client.metadata.abort([p.LeaseScope(scope=client.scope, leases=leased.leases)])
    eventually(lambda: aborts(kept_server) == before + 1)


def test_many_threads_leave_a_server_once(client):
    client.home.manner = Manner.HANGS
    gate = threading.Barrier(8)

    def ask(_):
        gate.wait()
        client.lookup()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    assert client.left == 1


def test_a_client_that_waits_for_a_server_closes_at_once(client, monkeypatch):
    monkeypatch.setattr(http_client_module, "CLOSE_SECONDS", 2 * PATIENCE_SECONDS)
    client.home.manner = Manner.HANGS
    client.lookup()
    begin = time.monotonic()
    client.metadata.close()
    # Less than what `close` grants to requests that nobody waits for.
    assert time.monotonic() - begin < PATIENCE_SECONDS


# What servers answer.


def problem(status, code):
    return reply(
        f"{status} No".encode(),
        msgspec.msgpack.encode({"code": code, "message": "no", "field": ""}),
    )


def calls(requests):
    """How many requests were no questions whether a server is ready."""
    return sum(b"/v2/" in data for data in requests)


def look_up(client):
    part = p.LookupScope(scope="0:kv", keys=["a"])
    return client.send("/v2/lookup", p.Lookup(scopes=[part]), p.LookedUp, Call(10.0))


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


@pytest.fixture
def serve(stack):
    """Starts a server of one answer; its address, and the requests that it has read."""
    return lambda answer: stack.enter_context(listening(answer))


@pytest.fixture
def client_of(stack):
    """Makes a client of some addresses."""
    return lambda *urls, **options: stack.enter_context(
        closing(HttpMetadataClient(urls, rng=random.Random(1), **options))
    )


@pytest.mark.parametrize(
    ("status", "code", "error", "asked"),
    [
        (400, "malformed", MetadataError, [0, 1]),
        (401, "unauthorized", MetadataError, [0, 1]),
        (403, "forbidden", MetadataError, [0, 1]),
        (404, "unknown_scope", UnknownScopeError, [0, 1]),
        (409, "mismatch", ScopeMismatchError, [0, 1]),
        (413, "too_large", MetadataError, [0, 1]),
        (422, "invalid", MetadataError, [0, 1]),
        (429, "too_many", RateLimitedError, [0, 1]),
        # No faults of the store, which open no breaker.
        (429, "too_many", StorageRefusedError, [0, 1]),
        (403, "quota", StorageRefusedError, [0, 1]),
        (408, "late", BusyError, [0, ATTEMPTS + 1]),
        *((status, "internal", RetryableError, [2, 2]) for status in (500, 502, 503, 504)),
        (503, "moving", NoOwnerError, [2, 2]),
        (503, "unavailable", NoOwnerError, [2, 2]),
        (503, "draining", DrainingError, [1, 1]),
    ],
)
def test_how_often_two_servers_that_answer_alike_are_asked(
    serve, client_of, status, code, error, asked
):
    """A refusal is taken from the first one; what another may answer is asked of it under one key, and
    the first one is left, unless it only has no owner to name."""
    servers, left = [serve(problem(status, code)) for _ in range(2)], list[int]()
    client = client_of(*[url for url, _ in servers], on_failover=lambda: left.append(1))
    request = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["a"])])
    with pytest.raises(error):
        client.send("/v2/reserve", request, p.Leases, Call(PATIENCE_SECONDS))
    assert sorted(calls(requests) for _, requests in servers) == asked
    assert len(left) == (asked[0] > 0 and error is not NoOwnerError)
    lines = b"".join(data for _, requests in servers for data in requests).lower().splitlines()
    assert len({line for line in lines if line.startswith(b"idempotency-key")}) == 1


FOUND = p.encode(
    p.LookedUp(scopes=[p.FoundPages(slots=[3], generations=[1], lengths=[1], checksums=[1])]),
    p.MSGPACK,
)


def moved(url):
    body = msgspec.msgpack.encode({"code": "moved", "message": "no", "field": ""})
    return reply(b"307 No\r\nLocation: " + f"{url}/v2/lookup".encode(), body)


def test_the_owner_of_a_scope_is_asked_first_once_it_is_known(serve, client_of):
    owner, at_owner = serve(reply(b"200 OK", FOUND))
    server, at_server = serve(moved(owner))
    client = client_of(server)
    for _ in range(3):
        assert look_up(client).scopes[0].slots == [3]
    assert (calls(at_server), calls(at_owner)) == (1, 3)


@pytest.mark.parametrize(("error", "asks"), [(RetryableError, True), (NoResponseError, False)])
def test_an_owner_in_backoff_is_asked_where_that_costs_no_time(serve, client_of, error, asks):
    """It may have been started again since, and another server names it."""
    owner, at_owner = serve(reply(b"200 OK", FOUND))
    server, _ = serve(moved(owner))
    client = client_of(server, owner)
    named = client._servers.at(owner)
    named.in_backoff = True
    named.failed_at, named.was_silent = time.monotonic(), error is NoResponseError
    if asks:
        assert look_up(client).scopes[0].slots == [3]
    else:
        with pytest.raises(BusyError):
            look_up(client)
    assert bool(at_owner) == asks
    named.failed_at -= OWNER_SECONDS
    assert named.may_own


@pytest.mark.parametrize("code", ["moving", "unavailable"])
def test_a_server_that_is_cut_off_from_the_store_is_not_asked_for_ever(serve, client_of, code):
    """It cannot name the new owner. It is not left for good, since it may serve other scopes."""
    owner, at_owner = serve(reply(b"200 OK", FOUND))
    server, at_server = serve(problem(503, code))
    client = client_of(server, owner)
    client._owners["0:kv"] = client._servers.at(server)
    for _ in range(3):
        assert look_up(client).scopes[0].slots == [3]
    assert (calls(at_server), calls(at_owner)) == (1, 3)
    assert not client._servers.at(server).in_backoff


def test_servers_that_disagree_about_an_owner_send_nobody_back_and_forth_for_ever(serve, client_of):
    server, asked = serve(moved("http://127.0.0.1:9"))
    client = client_of(server, "http://127.0.0.1:9")
    with pytest.raises(RetryableError):
        look_up(client)
    assert 1 <= calls(asked) <= ATTEMPTS + 1


def test_a_redirection_to_another_route_is_not_followed(serve, client_of):
    elsewhere, asked = serve(reply(b"200 OK", FOUND))
    location = f"{elsewhere}/v2/clear".encode()
    server, _ = serve(reply(b"307 No\r\nLocation: " + location, b""))
    client = client_of(server)
    with pytest.raises(RetryableError, match="a redirection to"):
        client.send("/v2/lookup", p.Lookup(scopes=[]), p.LookedUp, Call(10.0))
    assert not asked


def test_two_addresses_that_are_two_stores_lose_pages_and_are_told(kept_server, server_two, caplog):
    """Nothing can prove that addresses belong to one store. A scope that is not there is made
    anew."""
    client = Client([kept_server, server_two])
    with closing(client.metadata), caplog.at_level(logging.WARNING):
        client.metadata.refresh(Call(10))
        client.reserve(["a"])
        client.metadata._servers._all[0].in_backoff = True
        assert client.lookup(["a"]).slots == [-1]
        assert "are they one store?" in caplog.text
