"""A shared store behind TLS, passwords and an ACL: real handshakes, the user of the documents, and
no secret anywhere."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import suppress
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.backup import _without_credentials
from hicache_metadata_server.core.errors import RequestError, StoreError
from hicache_metadata_server.core.tenants import Caller
from hicache_metadata_server.shared.assembly import check_store
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.scripts import IdempotencyKey
from hicache_metadata_server.storage.address import AddressKind, TlsFiles, parse_address, redacted
from tests.metadata_server.certificates import Authority
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.redis_users import (
    LOGIN,
    PASSWORD,
    denied,
    documented_user,
    guarded,
    permitted,
    secured,
    used,
    with_password,
)
from tests.metadata_server.test_shared import service_on, stored
from tests.support.commands import run_metadata

ONLY_CLUSTERS = {"cluster|slots", "command", "del"}
ELSEWHERE = {"asking", "wait"}
"""While keys are moved between nodes; with replicas."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("guarded")
    with redis_server(directory, **guarded(directory)) as server:
        yield server


@pytest.fixture
def url(place, tmp_path):
    with place.client() as client:
        client.flushall()
        client.acl_log_reset()
        client.config_resetstat()
    return with_password(place.url_of(LOGIN).replace("/0?", "/3?"), tmp_path)


async def everything(url):
    """Each script, and each command beside them."""
    async with service_on(url, slots=12, quarantine_seconds=0.0) as service:
        keys = [f"k{number}" for number in range(8)]
        await stored(service, keys, prefixes=("", *keys[:-1]))
        part = p.LookupScope(scope="0:kv", keys=keys)
        found = await service.lookup(p.Lookup(scopes=[part], touch=True, pin_seconds=5.0))
        await service.touch(p.Touch(scopes=[part]))
        await service.unpin(p.Unpin(pins=[found.pin]))
        await service.unpin(p.Unpin(pins=[found.pin]), caller=Caller(tenant="acme"))
        more = [f"m{number}" for number in range(12)]
        once = IdempotencyKey("once", b"digest")
        leased = (
            await service.reserve(
                p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=more, prefixes=[])]), once
            )
        ).scopes[0]
        assert leased.evicted > 0
        leases = [lease for lease in leased.leases if lease]
        await service.renew(p.Renew(scopes=[p.LeaseScope(scope="0:kv", leases=leases)]))
        await service.abort(p.Abort(scopes=[p.LeaseScope(scope="0:kv", leases=leases)]))
        await service.delete(
            p.Delete(scopes=[p.DeleteScope(scope="0:kv", keys=keys[:1], generations=[])])
        )
        await service.inspect(p.Inspect(scope="0:kv", slots=[0], keys=keys))
        assert (await fsck(service, p.Fsck())).problems == []
        await stored(service, ["last"])
        await service.clear(
            p.Clear(scopes=["0:kv"]), idempotency_key=IdempotencyKey("clear", b"digest")
        )
        await service.look()
        service.draining = True
        with pytest.raises(RequestError, match="drains"):
            await service.reserve(
                p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["x"], prefixes=[])]),
                IdempotencyKey("x", b"x"),
            )


async def test_the_documented_user_is_enough_for_everything_and_has_nothing_to_spare(
    place, url, tmp_path
):
    await asyncio.to_thread(check_store, url, p.StoreDurability.NONE)
    await everything(url)
    for arguments in (
        ("import", write_import(tmp_path), "--store", url),
        ("fsck", "--store", url),
        ("backup", url, tmp_path / "b"),
        ("restore", tmp_path / "b", url, "--replace"),
        ("copy", url, f"sqlite:///{tmp_path}/m.db"),
    ):
        done = await asyncio.to_thread(run_metadata, *arguments)
        assert done.exit_code == 0, done.output
        assert PASSWORD not in done.output
    with place.client(db=3) as client:
        client.hset("hm:{7:kv}:live", "planted", 3)
    checked = await asyncio.to_thread(run_metadata, "fsck", "--store", url)
    assert "7:kv: " in checked.output
    assert denied(place) == []
    assert permitted() - used(place) - ONLY_CLUSTERS - ELSEWHERE == set()


def write_import(tmp_path):
    file = tmp_path / "metadata.json"
    file.write_text(
        '{"7:kv": {"num_pages": 4, "free_pages": [1, 2, 3], "key_to_index": [["k", 0]]}}'
    )
    return file


async def test_a_cluster_behind_tls_with_the_documented_user(tmp_path):
    with redis_cluster(tmp_path, **guarded(tmp_path)) as cluster:
        url = with_password(cluster.url_of(LOGIN), tmp_path)
        await asyncio.to_thread(check_store, url, p.StoreDurability.NONE)
        await everything(url)
        assert [denied(node) for node in cluster.nodes] == [[], [], []]
        assert set().union(*map(used, cluster.nodes)) >= ONLY_CLUSTERS


async def test_a_password_that_is_changed_needs_no_restart(place, url, tmp_path):
    try:
        async with service_on(url) as service:
            await stored(service, ["a"])
            with place.client() as client:
                client.execute_command("ACL", "SETUSER", "hicache", ">another-one", f"<{PASSWORD}")
                client.client_kill_filter(_type="normal", skipme=True)
            for _ in range(2):
                # One call may meet a connection that was ended.
                with suppress(StoreError):
                    await service.look()
            with pytest.raises(StoreError, match="invalid username-password"):
                await service.look()
            with_password("", tmp_path, "another-one")
            await stored(service, ["b"])
    finally:
        with place.client() as client:
            client.execute_command("ACL", "SETUSER", *documented_user().split())


REFUSED = {
    "a wrong password": (
        lambda url: url.replace(LOGIN, f"hicache:{SECRET}@").partition("&password_file")[0],
        "invalid username-password",
    ),
    "no password": (
        lambda url: url.replace(LOGIN, "").partition("&password_file")[0],
        "authenticated",
    ),
    "an unknown user": (lambda url: url.replace(LOGIN, "nobody@"), "invalid username-password"),
    "no TLS": (lambda url: "redis://" + url.partition("://")[2].partition("?")[0], None),
    "an unknown authority": (
        lambda url: url.replace("/authority.pem", "/other.pem"),
        "CERTIFICATE_VERIFY_FAILED",
    ),
    "another host": (lambda url: url.replace("127.0.0.1", "localhost2"), None),
    "no client certificate": (lambda url: url.partition("&certificate")[0], None),
}
SECRET = "my-secret-password-41"


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_said_without_secrets(place, url, what):
    Authority(place.tls.ca.parent, "other")
    change, why = REFUSED[what]
    with pytest.raises(StoreError, match=why) as caught:
        check_store(change(url), p.StoreDurability.NONE)
    told = "".join(traceback.format_exception(caught.value))
    assert SECRET not in told
    assert PASSWORD not in told


def test_a_certificate_of_another_host_is_refused(tmp_path):
    tls = secured(tmp_path)
    tls.certificate, tls.key = Authority(tmp_path).sign("elsewhere", hosts=("DNS:cache.example",))
    with redis_server(tmp_path, tls=tls) as server:
        tls.ca = tmp_path / "authority.pem"
        with pytest.raises(StoreError, match="IP address mismatch"):
            check_store(server.url, p.StoreDurability.NONE)


async def test_a_user_that_may_not_is_told_what(place, url):
    with place.client() as client:
        client.execute_command("ACL", "SETUSER", "hicache", "-hset")
    try:
        with pytest.raises(StoreError, match=r"run this command|hset"):
            await everything(url)
    finally:
        with place.client() as client:
            client.execute_command("ACL", "SETUSER", *documented_user().split())


def test_a_password_file_that_is_of_no_use(place, url, tmp_path):
    with_password("", tmp_path, "")
    with pytest.raises(StoreError, match=r"redis\.password is empty"):
        check_store(url, p.StoreDurability.NONE)
    (tmp_path / "redis.password").unlink()
    with pytest.raises(ValueError, match="password_file: there is no file"):
        check_store(url, p.StoreDurability.NONE)


# Addresses.


def test_addresses_are_taken_apart(tmp_path):
    for name in ("ca.pem", "c.pem", "c.key", "p"):
        (tmp_path / name).touch()
    one = parse_address(
        f"rediss://me:p%40ss%2F@[::1]:1/4?ca={tmp_path}/ca.pem&certificate={tmp_path}/c.pem&key={tmp_path}/c.key"
    )
    assert (one.kind, one.hosts, one.db, one.login.user, one.login.password) == (
        AddressKind.ONE,
        (("::1", 1),),
        4,
        "me",
        "p@ss/",
    )
    assert one.tls == TlsFiles(f"{tmp_path}/ca.pem", f"{tmp_path}/c.pem", f"{tmp_path}/c.key")
    assert one.redacted == "rediss://***@[::1]:1/4"
    assert "p@ss" not in repr(one)
    assert parse_address("valkey://host").hosts == (("host", 6379),)
    assert parse_address("redis://host").tls is None
    by = parse_address(
        f"valkeys+sentinel://a,b:2/cache/1?sentinel_user=s&sentinel_password_file={tmp_path}/p"
    )
    assert (by.kind, by.hosts, by.name, by.db) == (
        AddressKind.SENTINEL,
        (("a", 26379), ("b", 2)),
        "cache",
        1,
    )
    assert (by.sentinel_login.user, by.sentinel_login.password_file, by.tls) == (
        "s",
        f"{tmp_path}/p",
        TlsFiles(),
    )
    assert parse_address("unix:///run/redis.sock?db=2").path == "/run/redis.sock"
    assert parse_address("unix:///run/redis.sock?db=2").db == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "a shared store is redis://"),
        ("redis://:pa/ss@host", "written %2F"),
        ("redis://:pa?ss@host", "written %2F"),
        ("redis://:pa#ss@host", "written %2F"),
        ("redis://user:pass", "one of the hosts is no HOST:PORT"),
        ("redis+cluster://host", "'host' is no HOST:PORT"),
        ("redis://host:70000", "one of the hosts is no HOST:PORT"),
        ("redis://a:1,b:2", r"redis\+sentinel://"),
        ("redis+sentinel://a:1", "the primary's name"),
        ("redis+cluster://a:1/2", "no database but 0"),
        ("redis://host/x", "the database is a number"),
        ("unix://", "unix:///PATH"),
        ("redis://host?ca=/x", "those of TLS need rediss://"),
        ("rediss://host?ca=/nonesuch", "ca: there is no file /nonesuch"),
        ("redis://host?password=pass", "has no options but password_file$"),
        ("redis://host?sentinel_user=x", "has no options but password_file$"),
        ("rediss://host?key=/dev/../etc/hostname", "a key needs its certificate"),
        ("redis://:pass@host?password_file=/etc/hostname", "leave one out"),
    ],
)
def test_addresses_that_are_none(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_address(url)
    assert "pa" not in str(caught.value).replace("path", "").replace("password", "").replace(
        "apart", ""
    )


PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1).map(
    lambda text: f"S3cr3t{text}T3rc3s"
)


@given(
    PASSWORDS,
    st.sampled_from(
        [
            "redis://{}host:1/2",
            "redis+cluster://{}a:1,b:2",
            "unix://{}/run/x",
            "valkeys+sentinel://{}a/n",
        ]
    ),
)
def test_any_password_can_be_written_in_an_address(password, url):
    address = parse_address(url.format(f"me:{quote(password, safe='')}@"))
    assert (address.login.user, address.login.password) == ("me", password)
    assert "S3cr3t" not in address.redacted


@given(
    PASSWORDS,
    st.sampled_from(
        [
            "redis://:{}@host:1/2",
            "redis+cluster://u:{}@a:1,b",
            "unix://:{}@/run/x",
            "redis://u:{}",
            "rediss://{}@h?x=1",
        ]
    ),
)
def test_no_password_is_told_however_wrong_the_address_is(password, url):
    """Written as it is, with characters that take an address apart."""
    written = url.format(password)
    told = ""
    try:
        parse_address(written)
    except ValueError as error:
        told = str(error)
    assert "S3cr3t" not in told
    assert "T3rc3s" not in told
    if "@" in written:
        assert "S3cr3t" not in redacted(written) + _without_credentials(written)
