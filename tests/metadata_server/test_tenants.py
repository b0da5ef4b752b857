"""Tenants: what they may have, and that many clients at once get no more."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.security import RateLimiter
from hicache_metadata_server.auth.tenants_file import read_tenants_file
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.tenants import Caller, Quota, Quotas, Tenants, TenantUsage
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.http_calls import running
from tests.metadata_server.servers import DURABLE, served
from tests.metadata_server.test_refusals import bearer, guarded
from tests.metadata_server.token_files import write_tokens
from tests.support.metadata import HttpClient

ACME = Caller("t", p.Token.WRITE, "acme")


def geometry(scope="0:a", slots=1, slot_bytes=0):
    return p.ScopeGeometry(scope=scope, slots=slots, slot_bytes=slot_bytes)


def with_quota(**limits):
    service = MetadataService()
    service.tenants.quotas = Quotas({"acme": Quota(**limits)})
    return service


def initialize(service, *parts, caller=ACME):
    try:
        service.initialize(p.Initialize(scopes=list(parts)), 0.0, caller)
    except RequestError as refused:
        return refused.problem.code
    return "done"


def test_quotas_count_all_scopes_of_a_tenant():
    for limits, last in (
        ({"scopes": 2}, geometry("0:c")),
        ({"slots": 20}, geometry("0:c", 1, 1)),
        ({"bytes": 2000}, geometry("0:c", 1, 1)),
    ):
        service = with_quota(**limits)
        assert initialize(service, geometry("0:a", 10, 100), geometry("0:b", 10, 100)) == "done"
        assert initialize(service, last) == "quota"
        assert initialize(service, geometry("0:a", 10, 100)) == "done", (
            "what is there may be initialized again"
        )
        assert initialize(service, last, caller=Caller("t", p.Token.WRITE, "other")) == "done"
        assert (
            initialize(service, geometry("0:d", 2**40, 100), caller=Caller("t", p.Token.WRITE, ""))
            == "done"
        )


def test_a_request_beyond_a_quota_makes_none_of_its_scopes():
    service = with_quota(scopes=2)
    assert initialize(service, *(geometry(f"0:{i}") for i in range(3))) == "quota"
    assert service.list_scopes().scopes == []
    assert initialize(service, *(geometry("0:a"), geometry("0:a"), geometry("0:b"))) == "done"


def test_where_bytes_are_limited_slots_say_how_large_they_are():
    service = with_quota(bytes=100)
    assert initialize(service, geometry("0:a", 10)) == "quota"
    assert initialize(service, geometry("0:a", 10, 10)) == "done"


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
    st.builds(Quota, *[st.none() | st.integers(0, 60)] * 3),
)
def test_what_is_given_is_what_fits(sizes, quota):
    service, held = MetadataService(), TenantUsage()
    service.tenants.quotas = Quotas(default=quota)
    for number, (slots, slot_bytes) in enumerate(sizes):
        new = TenantUsage(held.scopes + 1, held.slots + slots, held.bytes + slots * slot_bytes)
        fits = all(
            most is None or has <= most
            for has, most in zip(new, (quota.scopes, quota.slots, quota.bytes), strict=True)
        )
        assert initialize(service, geometry(f"0:{number}", slots, slot_bytes)) == (
            "done" if fits else "quota"
        )
        held = new if fits else held
    assert TenantUsage.of(service.held_by("acme")) == held


async def test_the_compatible_part_has_the_same_quota(tmp_path):
    options = guarded(tmp_path, "acme", "")
    options["service"].tenants.quotas = Quotas(default=Quota(scopes=1, slots=10))

    async with running(**options) as caller:
        for token, rank, pages, status in (
            ("write-acme", 0, 11, 403),
            ("write-acme", 0, 10, 204),
            ("write-acme", 0, 10, 204),
            ("write-acme", 1, 1, 403),
            ("write-", 1, 100, 204),
        ):
            reply = await caller.post(
                f"/{rank}/initialize", {"num_pages": pages}, headers=bearer(token)
            )
            assert reply.status == status, reply
        assert reply.status == 204
        told = (await caller.send("GET", "/metrics", headers=bearer("read-"))).body.decode()
        assert 'hicache_metadata_tenant_holds{tenant="acme",what="slots"} 10.0' in told
        assert 'hicache_metadata_tenant_quota{tenant="acme",what="slots"} 10.0' in told


class ConcurrentClients:
    """Clients in threads of their own, until each has done its part."""

    def __init__(self, url, clients, work):
        self.failures = []
        self.threads = [
            threading.Thread(target=self._run, args=(url, work, number))
            for number in range(clients)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, url, work, number):
        try:
            with closing(HttpClient(url, "token-of-acme")) as wire:
                work(wire, number)
        except Exception as error:  # noqa: BLE001 - it is told where the threads are joined
            self.failures.append(error)

    def join(self):
        for thread in self.threads:
            thread.join()
        assert self.failures == []


@pytest.fixture
def place(tmp_path):
    tokens = write_tokens(
        tmp_path / "tokens.json", acme="write token-of-acme acme", operator="admin operator"
    )
    quotas = tmp_path / "tenants.toml"
    quotas.write_text("[tenants.acme]\nmax_scopes = 30\nmax_slots = 2000\nmax_bytes = 1_000_000\n")
    with served(f"{DURABLE} --token-file {tokens} --tenants-file {quotas}", "operator") as (
        place,
        client,
    ):
        yield place, client, quotas


def test_many_clients_get_no_more_than_its_quota(place):
    """Eight clients make scopes as fast as they can, and what the server has is looked at all the
    while."""
    place, client, _ = place
    given, most = [], TenantUsage(30, 2000, 1_000_000)

    def make(wire, number):
        chance = random.Random(number)
        for i in range(60):
            some = [
                geometry(
                    f"{number}:{i}-{j}",
                    chance.choice((1, 10, 100, 300)),
                    chance.choice((1, 500, 4096)),
                )
                for j in range(2)
            ]
            reply = wire.post("/v2/initialize", p.Initialize(scopes=some))
            assert reply.status in (200, 403), reply
            if reply.status == 200:
                given.extend(some)

    clients = ConcurrentClients(place.url, 8, make)
    looks = 0
    while any(thread.is_alive() for thread in clients.threads) or not looks:
        scopes = listed(client)
        assert all(has <= limit for has, limit in zip(TenantUsage.of(scopes), most, strict=True))
        looks += 1
    clients.join()
    assert TenantUsage.of(listed(client)) == TenantUsage.of(given), (
        "what was given is what is there, and nothing else"
    )
    assert given
    place.kill()
    place.start()
    client.http.drop()
    assert TenantUsage.of(listed(client)) == TenantUsage.of(given)
    refused = client.http.post("/v2/initialize", p.Initialize(scopes=[geometry("9:x", 2000, 500)]))
    assert refused.status == 200, "an admin without a tenant has no quota"


def listed(client):
    return p.decode(client.http.get("/v2/scopes").body, p.Scopes).scopes


def test_many_clients_send_no_more_than_its_rate(place):
    place, client, quotas = place
    assert client.http.post("/0/initialize", {"num_pages": 1}).status == 204
    rate, burst = 4.0, 5
    quotas.write_text(f"[default]\nrequests_per_second = {rate}\nburst = {burst}\n")
    until_metric(client, 'hicache_metadata_reloads_total{what="tenants"} 2.0')
    answers, begin = [], time.monotonic()

    def ask(wire, number):
        while time.monotonic() < begin + 1.5 or (
            429 not in answers and time.monotonic() < begin + 60
        ):
            answers.append(wire.get("/v2").status)

    ConcurrentClients(place.url, 8, ask).join()
    seconds = time.monotonic() - begin
    assert set(answers) == {200, 429}
    assert answers.count(200) <= rate * seconds + burst
    assert answers.count(200) >= burst
    assert client.http.get("/v2").status == 200, "others are not held up"


def until_metric(client, line):
    until = time.monotonic() + 30
    while line not in client.http.get("/metrics").body.decode():
        assert time.monotonic() < until, f"{line} does not come"
        time.sleep(0.05)


def rates(**quota):
    now, tenants = [0.0], Tenants()
    tenants.quotas = Quotas({"acme": Quota(**quota)})
    return now, RateLimiter(tenants, clock=lambda: now[0])


def admitted(made, route="/v2/lookup", caller=ACME):
    try:
        made.admit(caller, route)
    except RequestError as error:
        refused = error
    else:
        return 0
    assert (refused.status, refused.problem.code) == (429, "too_many")
    return refused.retry_seconds


def test_a_rate_is_a_bucket_that_fills():
    now, made = rates(requests_per_second=2.0, burst=3.0)
    assert [admitted(made) for _ in range(5)] == [0, 0, 0, 1, 1]
    now[0] += 0.5
    assert [admitted(made) for _ in range(2)] == [0, 1]
    now[0] += 100
    assert [admitted(made) for _ in range(4)] == [0, 0, 0, 1]
    assert made.throttled == {"acme": 4}
    assert admitted(made, caller=Caller("t", p.Token.WRITE, "other")) == 0
    assert admitted(made, caller=Caller("t", p.Token.ADMIN, "", sees_all=True)) == 0


def test_a_slow_rate_says_when_to_come_again():
    now, made = rates(requests_per_second=0.1)
    assert [admitted(made) for _ in range(2)] == [0, 10]
    now[0] += 9.5
    assert admitted(made) == 1


@pytest.mark.parametrize(
    "route", ["/v2/commit", "/v2/abort", "/v2/renew", "/v2/unpin", "/{rank}/confirm_write"]
)
def test_what_was_begun_is_ended_ahead_of_the_rate(route):
    _, made = rates(requests_per_second=1.0, burst=5.0)
    assert [admitted(made) for _ in range(6)] == [0] * 5 + [1]
    assert [admitted(made, route) for _ in range(6)] == [0] * 5 + [1]
    assert admitted(made) == 6, "and counts"


async def test_a_refusal_says_when_to_come_again(tmp_path):
    options = guarded(tmp_path, "acme")
    options["service"].tenants.quotas = Quotas(default=Quota(requests_per_second=0.5))

    async with running(**options) as caller:
        assert (await caller.send("GET", "/v2", headers=bearer("read-acme"))).status == 200
        refused = await caller.send("GET", "/v2", headers=bearer("read-acme"))
        assert (refused.status, refused.json["code"], refused.headers["retry-after"]) == (
            429,
            "too_many",
            "2",
        )


def test_a_file_of_quotas(tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(
        '[default]\nmax_scopes = 4\n[tenants.acme]\nmax_bytes = "2GiB"\nmax_slots = '
        "7\nrequests_per_second = 10\n[tenants.free]\n"
    )
    quotas = read_tenants_file(file)
    assert quotas.of("acme") == Quota(None, 7, 2 << 30, 10.0)
    assert (quotas.of("free"), quotas.of("unnamed"), quotas.of("")) == (
        Quota(),
        Quota(scopes=4),
        Quota(),
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "[default]\nmax_pages = 1",
            "default.max_pages: there is no such key; did you mean 'max_scopes'",
        ),
        (
            "[tenants.acme]\nmax_slot = 1",
            "tenants.acme.max_slot: there is no such key; did you mean 'max_slots'?",
        ),
        ("[defaults]\nmax_slots = 1", "defaults: there is no such key; did you mean 'default'?"),
        ("zzz = 1", "zzz: there is no such key; there are default, tenants"),
        ("[tenants.a]\nmax_slots = -1", "tenants.a.max_slots"),
        ("[tenants.a]\nmax_bytes = 'much'", "tenants.a.max_bytes"),
        ("[tenants.a]\nrequests_per_second = 0", "requests_per_second"),
        ("[tenants.a]\nrequests_per_second = inf", "requests_per_second"),
        ("[tenants.a]\nburst = 5", "burst needs requests_per_second"),
        ("[tenants.'a b']\n", "a tenant is called"),
        ("[tenant.a]\n", "tenant"),
        ("most", "no TOML"),
        ("\xff", "no TOML"),
    ],
)
def test_a_file_of_quotas_that_means_nothing_is_refused(tmp_path, content, said):
    file = tmp_path / "tenants.toml"
    file.write_text(content, "latin-1")
    with pytest.raises(ValueError, match=said):
        read_tenants_file(file)
    file.chmod(0o666)
    with pytest.raises(ValueError, match="chmod go-w"):
        read_tenants_file(file)


def restored(tmp_path, now=1.0):
    store = open_store(f"sqlite:///{tmp_path}/m.db")
    service = MetadataService(DEFAULTS, durability=store.durability)
    service.restore(store.recover(now), store.rows, now)
    return store, service


@pytest.mark.parametrize("compacted", [False, True])
def test_a_store_keeps_whose_a_scope_is(tmp_path, compacted):
    store, service = restored(tmp_path)
    assert initialize(service, geometry("0:a")) == "done"
    assert initialize(service, geometry("0:b"), caller=Caller()) == "done"
    store.write(service.take_changes())
    while compacted and store.wants_compaction(idle=True):
        store.compact(store.collect(service.scope_of), 1.0)
    store.close()
    store, service = restored(tmp_path)
    assert service.tenants.of_scope == {"0:a": "acme", "0:b": ""}
    store.close()
