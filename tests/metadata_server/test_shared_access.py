"""A shared store behind TLS, passwords and an ACL: real handshakes, the user of the documents, and
no secret anywhere."""

from __future__ import annotations

import asyncio
import re
import traceback
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared import scope_log
from hicache_metadata_server.shared.address import ONE, SENTINEL, parse_address
from hicache_metadata_server.shared.connection import check_store
from hicache_metadata_server.storage.store import redacted
from tests.metadata_server.certificates import Authority
from tests.metadata_server.http_calls import eventually, running_shared
from tests.metadata_server.redis_servers import Secured, redis_cluster, redis_server
from tests.support.commands import run_metadata

LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.0)
ONLY_CLUSTERS = {"cluster|slots", "command"}
PAGE = Path(__file__).parents[2] / "docs/metadata-server.md"
ADMIN = "admin-of-redis-9f2c51"
PASSWORD = "server-of-redis-77aa01"
LOGIN = "hicache@"


def documented_user():
    """The line of the page, for redis.conf, without its first word."""
    [line] = re.findall(r"^user (hicache .*)$", PAGE.read_text(), re.MULTILINE)
    assert ">PASSWORD" in line
    return line.replace(">PASSWORD", f">{PASSWORD}")


def permitted():
    """The commands that it may use, by their names in `INFO commandstats`."""
    return {word.removeprefix("+") for word in documented_user().split() if word.startswith("+")}


def secured(directory):
    """Files for Redis and for its clients."""
    authority = Authority(directory)
    certificate, key = authority.sign("redis")
    return Secured(authority.file, certificate, key)


def guarded(directory):
    """Settings of a Redis with TLS, a password and the documented user."""
    return {"tls": secured(directory), "password": ADMIN, "user": documented_user()}


def with_password(url, directory, password=PASSWORD):
    """An address with the password in a file."""
    file = directory / "redis.password"
    file.write_text(f"{password}\n")
    return f"{url}{'&' if '?' in url else '?'}password_file={file}"


def denied(server):
    """Operations that the user was denied."""
    with server.client() as client:
        return [(entry["username"], entry["reason"], entry["object"]) for entry in client.acl_log()]


def used(server):
    """Commands that were called since the statistics began, by whomever."""
    with server.client() as client:
        return {name.removeprefix("cmdstat_") for name in client.info("commandstats")}


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

    async def compacted(caller):
        return not any(log.log_bytes for log in caller.app.store.logs())

    async with running_shared(url, LIMITS) as caller:
        reply = await caller.initialize("0:kv", "1:kv", slots=12)
        assert reply.status == 200, reply
        for number in range(40):
            reply = await caller.store("0:kv", [f"k{number}-{i}" for i in range(8)])
            assert reply.status == 200, reply
        with mock.patch.object(scope_log, "IDLE_LOG_BYTES", 0):
            await eventually(lambda: compacted(caller))
        assert (await caller.post("/v2/drop", {"scopes": ["1:kv"]})).status == 200
        assert list(await caller.scopes()) == ["0:kv"]
    async with running_shared(url, LIMITS) as caller:
        await eventually(lambda: exists(caller, "k39-0"))


async def exists(caller, key):
    return (await caller.post("/0/exists", {"keys": [key]})).json == {"exists": [True]}


async def test_the_documented_user_is_enough_for_everything_and_has_nothing_to_spare(
    place, url, tmp_path
):
    await asyncio.to_thread(check_store, url, p.StoreDurability.NONE)
    await everything(url)
    done = await asyncio.to_thread(run_metadata, "fsck", "--store", url)
    assert done.exit_code == 0, done.output
    assert PASSWORD not in done.output
    assert denied(place) == []
    # While keys are moved between nodes; with replicas.
    elsewhere = {"asking", "wait", "set"}
    assert permitted() - used(place) - ONLY_CLUSTERS <= elsewhere


async def test_a_cluster_behind_tls_with_the_documented_user(tmp_path):
    with redis_cluster(tmp_path, **guarded(tmp_path)) as cluster:
        url = with_password(cluster.url_of(LOGIN), tmp_path)
        await asyncio.to_thread(check_store, url, p.StoreDurability.NONE)
        await everything(url)
        assert [denied(node) for node in cluster.nodes] == [[], [], []]
        assert set().union(*map(used, cluster.nodes)) >= ONLY_CLUSTERS


async def test_a_password_that_is_changed_needs_no_restart(place, url, tmp_path):
    async def refused(caller):
        return b"invalid username-password" in (await caller.send("GET", "/readyz")).body

    try:
        async with running_shared(url, LIMITS) as caller:
            assert (await caller.initialize("0:kv", slots=12)).status == 200
            assert (await caller.store("0:kv", ["a"])).status == 200
            with place.client() as client:
                client.execute_command("ACL", "SETUSER", "hicache", ">another-one", f"<{PASSWORD}")
                client.client_kill_filter(_type="normal", skipme=True)
            await eventually(lambda: refused(caller))
            with_password("", tmp_path, "another-one")
            await eventually(lambda: exists(caller, "a"))
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
        "Authentication required",
    ),
    "an unknown user": (lambda url: url.replace(LOGIN, "nobody@"), "invalid username-password"),
    "no TLS": (lambda url: "redis://" + url.partition("://")[2].partition("?")[0], None),
    "an unknown authority": (lambda url: url.replace("/authority", "/other"), "VERIFY_FAILED"),
    "another host": (lambda url: url.replace("127.0.0.1", "localhost2"), None),
    "no client certificate": (lambda url: url.partition("&certificate")[0], None),
}
SECRET = "my-secret-password-41"


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_said_without_secrets(place, url, change, why):
    Authority(place.tls.ca.parent, "other")
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


def test_a_password_file_that_is_of_no_use(place, url, tmp_path):
    with_password("", tmp_path, "")
    with pytest.raises(StoreError, match=r"redis\.password is empty"):
        check_store(url, p.StoreDurability.NONE)
    (tmp_path / "redis.password").unlink()
    with pytest.raises(ValueError, match="password_file: there is no file"):
        check_store(url, p.StoreDurability.NONE)


# Addresses.


FILES = ("ca.pem", "c.pem", "c.key", "p")
TLS = "ca={0}/ca.pem&certificate={0}/c.pem&key={0}/c.key"


@pytest.mark.parametrize(
    ("url", "wanted", "options"),
    [
        (
            f"rediss://me:p%40ss%2F@[::1]:1/4?{TLS}",
            {"kind": ONE, "hosts": (("::1", 1),)},
            {
                "db": 4,
                "username": "me",
                "password": "p@ss/",
                "ssl_ca_certs": "{0}/ca.pem",
                "ssl_certfile": "{0}/c.pem",
                "ssl_keyfile": "{0}/c.key",
                "ssl_cert_reqs": "required",
            },
        ),
        (
            "valkeys+sentinel://a,b:2/cache/1?sentinel_user=s&sentinel_password_file={0}/p",
            {"kind": SENTINEL, "hosts": (("a", 26379), ("b", 2)), "name": "cache"},
            {"db": 1, "ssl": True, "username": None},
        ),
        ("valkey://host", {"hosts": (("host", 6379),)}, {"db": 0}),
        ("redis://host", {}, {"ssl": None}),
        ("unix:///run/redis.sock?db=2", {}, {"unix_socket_path": "/run/redis.sock", "db": 2}),
    ],
    ids=["all of one", "sentinels", "valkey", "redis", "unix"],
)
def test_addresses_are_taken_apart(tmp_path, url, wanted, options):
    for name in FILES:
        (tmp_path / name).write_text("secret")
    one = parse_address(url.format(tmp_path))
    assert {name: getattr(one, name) for name in wanted} == wanted
    assert "p@ss" not in repr(one)
    assert {name: one.options.get(name) for name in options} == {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    if one.kind == SENTINEL:
        assert one.sentinel_options["credential_provider"].get_credentials() == ("s", "secret")


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
    assert "pa" not in re.sub("path|password|apart", "", str(caught.value))


PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1).map(
    lambda text: f"S3cr3t{text}T3rc3s"
)


HOSTS = (
    "redis://{}host:1/2",
    "redis+cluster://{}a:1,b:2",
    "unix://{}/run/x",
    "valkeys+sentinel://{}a/n",
)


@given(PASSWORDS, st.sampled_from(HOSTS))
def test_any_password_can_be_written_in_an_address(password, url):
    written = url.format(f"me:{quote(password, safe='')}@")
    options = parse_address(written).options
    assert (options["username"], options["password"]) == ("me", password)
    assert "S3cr3t" not in redacted(written)


WRITTEN = (
    "redis://:{}@host:1/2",
    "redis+cluster://u:{}@a:1,b",
    "unix://:{}@/run/x",
    "redis://u:{}",
)


@given(PASSWORDS, st.sampled_from([*WRITTEN, "rediss://{}@h?x=1"]))
def test_no_password_is_told_however_wrong_the_address_is(password, url):
    """Written as it is, with characters that take an address apart."""
    written, told = url.format(password), ""
    try:
        parse_address(written)
    except ValueError as error:
        told = str(error)
    assert "S3cr3t" not in told
    assert "T3rc3s" not in told
    if "@" in written:
        assert "S3cr3t" not in redacted(written)
