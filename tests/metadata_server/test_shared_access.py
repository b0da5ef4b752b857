"""A shared store behind TLS and an ACL: the user of the documents is enough for everything, and no
message tells a secret."""

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

from hicache_conformance.harness.ports import free_ports
from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared import scope_log
from hicache_metadata_server.shared.address import ONE, SENTINEL, parse_address
from hicache_metadata_server.shared.connection import RedisConnection, check_store
from hicache_metadata_server.storage.store import redacted
from tests.metadata_server.certificates import Authority
from tests.metadata_server.http_calls import eventually, running_shared
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.support.commands import run_metadata

LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.0)
ONLY_CLUSTERS = {"cluster|slots", "command"}
PAGE = Path(__file__).parents[2] / "docs/metadata-server.md"
PASSWORD = "server-of-redis-77aa01"
SECRET = "my-secret-password-41"


def documented_user():
    """The line of the page, for redis.conf, without its first word."""
    [line] = re.findall(r"^user (hicache .*)$", PAGE.read_text(), re.MULTILINE)
    assert ">PASSWORD" in line
    return line.replace(">PASSWORD", f">{PASSWORD}")


def permitted():
    """The commands that it may use, by their names in `INFO commandstats`."""
    return {word.removeprefix("+") for word in documented_user().split() if word.startswith("+")}


def denied(server):
    """Operations that the user was denied."""
    with server.client() as client:
        return [(entry["username"], entry["reason"], entry["object"]) for entry in client.acl_log()]


def used(server):
    """Commands that were called since its start, by whomever."""
    with server.client() as client:
        return {name.removeprefix("cmdstat_") for name in client.info("commandstats")}


@pytest.fixture
def place(tmp_path):
    """A Redis that speaks TLS too, and the address for the user, whose password is in a file."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("redis", hosts=("IP:127.0.0.1",))
    [port] = free_ports(1)
    tls = {
        "tls_port": port,
        "tls_ca_cert_file": authority.file,
        "tls_cert_file": certificate,
        "tls_key_file": key,
        "tls_auth_clients": "yes",
    }
    file = tmp_path / "redis.password"
    file.write_text(f"{PASSWORD}\n")
    files = f"ca={authority.file}&certificate={certificate}&key={key}&password_file={file}"
    with redis_server(tmp_path, user=documented_user(), **tls) as server:
        yield server, f"rediss://hicache@127.0.0.1:{port}/3?{files}"


async def everything(url):
    """Each script, and each command beside them."""

    async def compacted(caller):
        return not any(log.log_bytes for log in caller.app.store.logs())

    async def exists(caller):
        answer = await caller.post("/0/exists", {"keys": ["k39-0"]})
        return answer.json == {"exists": [True]}

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
        await eventually(lambda: exists(caller))


async def test_the_documented_user_is_enough_for_everything_and_has_nothing_to_spare(place):
    server, url = place
    await asyncio.to_thread(check_store, url, p.StoreDurability.NONE)
    await everything(url)
    done = await asyncio.to_thread(run_metadata, "fsck", "--store", url)
    assert done.exit_code == 0, done.output
    assert PASSWORD not in done.output
    assert denied(server) == []
    # While keys are moved between nodes; with replicas.
    elsewhere = {"asking", "wait", "set"}
    assert permitted() - used(server) - ONLY_CLUSTERS <= elsewhere


async def test_the_documented_user_is_enough_for_a_cluster(tmp_path):
    with redis_cluster(tmp_path, user=documented_user()) as cluster:
        url = cluster.url.replace("://", f"://hicache:{PASSWORD}@")
        await asyncio.to_thread(check_store, url, p.StoreDurability.NONE)
        await everything(url)
        assert [denied(node) for node in cluster.nodes] == [[], [], []]
        assert set().union(*map(used, cluster.nodes)) >= ONLY_CLUSTERS


def test_what_is_refused_is_said_without_secrets(place, tmp_path):
    url, file = place[1], tmp_path / "redis.password"
    Authority(tmp_path, "other")
    with_password = url.partition("&password_file")[0].replace("hicache", f"hicache:{SECRET}")
    for written, content, kind, why in (
        (with_password, PASSWORD, StoreError, "invalid username-password"),
        (url.replace("/authority", "/other"), PASSWORD, StoreError, "VERIFY_FAILED"),
        (url.replace("127.0.0.1", "localhost"), PASSWORD, StoreError, "mismatch"),
        (url, SECRET, StoreError, "invalid username-password"),
        (url, "", StoreError, r"redis\.password is empty"),
        (url, None, ValueError, "password_file: there is no file"),
    ):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        with pytest.raises(kind, match=why) as caught:
            check_store(written, p.StoreDurability.NONE)
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET not in told
        assert PASSWORD not in told


# Addresses.


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
        (f"valkeys+cluster://a:1,b:2?{TLS}", {"hosts": (("a", 1), ("b", 2))}, {"ssl": True}),
        ("valkey://host", {"hosts": (("host", 6379),)}, {"db": 0}),
        ("redis://host", {}, {"ssl": None}),
        ("unix:///run/redis.sock?db=2", {}, {"unix_socket_path": "/run/redis.sock", "db": 2}),
    ],
    ids=["all of one", "sentinels", "a cluster", "valkey", "redis", "unix"],
)
def test_addresses_are_taken_apart(tmp_path, url, wanted, options):
    for name in ("ca.pem", "c.pem", "c.key", "p"):
        (tmp_path / name).write_text("secret")
    one = parse_address(url.format(tmp_path))
    assert {name: getattr(one, name) for name in wanted} == wanted
    assert "p@ss" not in repr(one)
    assert {name: one.options.get(name) for name in options} == {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    RedisConnection(url.format(tmp_path))
    if one.kind == SENTINEL:
        login = one.sentinel_options["credential_provider"]
        assert login.get_credentials() == ("s", "secret")
        (tmp_path / "p").write_text("changed\n")
        assert login.get_credentials() == ("s", "changed"), "read for each connection"


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
URLS = (
    "redis://me:{}@host:1/2",
    "redis+cluster://me:{}@a:1,b:2",
    "unix://me:{}@/run/x",
    "valkeys+sentinel://me:{}@a/n",
)


@given(PASSWORDS, st.sampled_from(URLS))
def test_any_password_can_be_written_and_none_is_told_however_wrong_the_address_is(password, url):
    """Escaped, or as it is, with characters that take an address apart."""
    escaped, plain = url.format(quote(password, safe="")), url.format(password)
    options = parse_address(escaped).options
    assert (options["username"], options["password"]) == ("me", password)
    for written in (escaped, plain, f"{plain}?x=1", f"redis://me:{password}"):
        told = ""
        try:
            parse_address(written)
        except ValueError as error:
            told = str(error)
        assert "S3cr3t" not in told
        assert "T3rc3s" not in told
        if "@" in written:
            assert "S3cr3t" not in redacted(written)
