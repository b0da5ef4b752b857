"""Audit log; and no secret in anything that a server writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from hicache_backends.hf3fs.config import Hf3fsConfig
from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.files import PREFIX, new_token
from hicache_metadata_server.auth.security import BURST, AuditLog
from hicache_metadata_server.client.http_transport import client_context
from hicache_metadata_server.core.limits import Caller
from hicache_metadata_server.logs import configure_logs
from hicache_metadata_server.settings import ServerSettings
from tests.metadata_server.certificates import Authority
from tests.metadata_server.every_route import SCOPE, ask, every_route, prepared
from tests.metadata_server.http_calls import audit_to, running
from tests.metadata_server.servers import DURABLE, Served
from tests.metadata_server.test_refusals import bearer, guarded
from tests.metadata_server.token_files import write_tokens
from tests.support.metadata import HttpClient
from tests.support.waiting import eventually


def lines(file):
    return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]


async def test_who_has_done_what(tmp_path):
    off = {"enabled": False}
    async with running(**guarded(tmp_path, "acme", "")) as caller:
        lease = await prepared(caller, bearer("write-acme"))
        assert lines(tmp_path / "audit") == []
        for asked in every_route(lease=lease):
            await ask(caller, asked, bearer("admin-"))
        await caller.post("/v2/clear", {"scopes": ["9:kv"]}, headers=bearer("admin-"))
        await caller.send("POST", "/v2/drain", b"{", headers=bearer("admin-"))
        for token in ("admin-acme", "read-acme", "nobody"):
            await caller.post("/v2/drain", off, headers=bearer(token))
    found = lines(tmp_path / "audit")
    by = {"event": "request", "token": "admin-", "tenant": "", "peer": "test:1"}
    own = {**by, "scopes": [SCOPE]}
    assert [line for line in found if line["event"] == "request"] == [
        {**own, "route": "/v2/clear", "status": 200},
        {**own, "route": "/v2/drop", "status": 409},
        {**own, "route": "/v2/fsck", "status": 200},
        {**by, "route": "/v2/drain", "enabled": True, "status": 200},
        {**own, "route": "/{rank}/clear", "status": 204},
        {**own, "route": "/v2/clear", "scopes": ["9:kv"], "status": 404},
        {**by, "route": "/v2/drain", "status": 400},
    ]
    by = {"event": "refused", "peer": "test:1", "route": "/v2/drain", "tenant": "acme"}
    forbidden = {"status": 403, "code": "forbidden"}
    assert [line for line in found if line["event"] == "refused"] == [
        {**by, "token": "admin-acme", **forbidden},
        {**by, "token": "read-acme", **forbidden},
        {**by, "token": "", "tenant": "", "status": 401, "code": "unauthorized"},
    ]


def test_many_refusals_are_some_lines_and_a_number(tmp_path):
    now = [0.0]
    audit = audit_to(tmp_path / "audit", clock=lambda: now[0])
    for host, port in [*(("10.0.0.1", port) for port in range(1000)), ("10.0.0.2", 1)]:
        audit.refused("/v2", 401, "unauthorized", None, f"{host}:{port}")
    now[0] = 1.0
    audit.refused("/v2", 401, "unauthorized", None, "10.0.0.1:1")
    found = [(line["peer"][:8], line.get("not_written", 0)) for line in lines(tmp_path / "audit")]
    *first, other, later = found
    assert first == [("10.0.0.1", 0)] * int(BURST)
    assert (other, later) == (("10.0.0.2", 0), ("10.0.0.1", 1000 - BURST))


async def test_what_clients_send_is_bounded(tmp_path):
    async with running(**guarded(tmp_path, "")) as caller:
        names = [f"{number}:{'x' * 128}" for number in range(64)]
        await caller.post("/v2/clear", {"scopes": names}, headers=bearer("admin-"))
        await caller.post("/v2/fsck", {"scopes": ["y" * 100_000]}, headers=bearer("admin-"))
        await caller.send("GET", "/" + "z" * 100_000)
    first, *others = (tmp_path / "audit").read_bytes().splitlines()
    assert msgspec.json.decode(first)["scopes_in_all"] == 64
    assert len(first) < 3000
    assert [len(line) < 300 for line in others] == [True, True]


@pytest.mark.parametrize("level", ["info", "error"])
def test_the_logger_has_a_name_of_its_own_and_a_level_that_no_setting_changes(capsys, level):
    configure_logs(level, "json")
    audit = AuditLog()
    audit.request("/v2/drain", 200, Caller("operator"), "10.0.0.1:1", p.Drain(enabled=True), ())
    audit.refused("/v2", 401, "unauthorized", None, "10.0.0.1:1")
    audit.write("reload", what="tokens", result="done", reason="")
    told = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in told] == ["request", "refused", "reload"]
    assert {line["logger"] for line in told} == {"hicache.audit"}
    assert told[2]["what"] == "tokens"


@pytest.mark.parametrize("form", ["json", "console"])
async def test_the_trace_of_a_fault_shows_no_token(tmp_path, form, capsys):
    configure_logs("debug", form)
    async with running(**guarded(tmp_path, "")) as caller:
        caller.service.limits = None
        body = {"scopes": [{"scope": SCOPE, "keys": ["k"]}]}
        reply = await caller.post("/v2/lookup", body, headers=bearer("write-"))
        assert (reply.status, reply.json["code"]) == (500, "internal")
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "Bearer" not in told
    assert "write-" not in told


def test_settings_and_options_do_not_show_tokens():
    secret = new_token()
    assert secret not in repr(ServerSettings(admin_token=secret))
    config = Hf3fsConfig(path="/x", token=secret, metadata_url="http://x")
    assert secret not in f"{config} {config!r} {[config]}"
    assert "metadata_url='http://x'" in repr(config)


def asked_by(client):
    """Replies to all routes."""
    for asked in every_route(lease=1):
        body = None if asked.body is None else msgspec.json.encode(asked.body)
        yield client.send(asked.method, asked.path, body)
    yield client.send("POST", "/v2/lookup", b"{")


def misplace(client, token):
    """Requests with the token where none belongs: a refusal may quote it, a log may not."""
    for path in (f"/{token}", f"/0/{token}", f"/v2/{token}", f"/v2?token={token}", f"/?{token}"):
        client.send("GET", path, None)
        client.send("POST", path, b"{")
    client.send("POST", "/v2/lookup", token.encode())
    headers = {"X-Token": token, "Cookie": token, "Idempotency-Key": token}
    client.send("GET", "/v2", None, headers=headers)


@pytest.mark.long
def test_nothing_that_a_server_writes_holds_a_secret(tmp_path, monkeypatch):
    tokens, quotas = tmp_path / "tokens.json", tmp_path / "quotas"
    by_name = {name: new_token() for name in ("read", "write", "admin", "env", "acme", "never")}
    rights = {name: f"{name} {by_name[name]}" for name in ("read", "write", "admin")}
    write_tokens(tokens, **rights, acme=f"admin {by_name['acme']} acme")
    quotas.write_text("[default]\nmax_scopes = 3\n")
    certificate, key = Authority(tmp_path).sign("server")
    monkeypatch.setenv("HICACHE_METADATA_ADMIN_TOKEN", by_name["env"])
    command = f"{DURABLE} --log-level debug --log-format json --token-file {tokens} "
    command += f"--tls-certificate {certificate} --tls-key {key} --tenants-file {quotas}"
    trusting, answers = client_context(ca=str(tmp_path / "authority.pem")), []
    with Served(command) as place:
        for token in (*by_name.values(), "", "Bearer"):
            client = HttpClient(place.url, token, trusting)
            answers += asked_by(client)
            misplace(client, token)
        # Files that are bad, with tokens in them where none belong, then a good one.
        good, never = tokens.read_text(), by_name["never"]
        bad = (f"write {never}\n", f'{{"version": 1, "tokens": ["{never}"]}}')
        for count, text in enumerate(bad, 1):
            tokens.write_text(text)
            eventually(lambda count=count: place.log().count("reload_failed") == count)
        tokens.write_text(good)
        eventually(lambda: '"reloaded"' in place.log())
        # What other servers take for a request to read their files again does no harm.
        os.kill(place.process.pid, signal.SIGHUP)
        answers += asked_by(HttpClient(place.url, by_name["env"], trusting))
        command_line = Path(f"/proc/{place.process.pid}/cmdline").read_text()
        place.process.terminate()
        place.process.wait(30)
        log = place.log()
    audited = [line for line in log.splitlines() if '"hicache.audit"' in line]
    events = {msgspec.json.decode(line)["event"] for line in audited}
    assert events == {"request", "refused", "reload"}
    assert {reply.status for reply in answers} >= {200, 204, 400, 401, 403, 404}
    assert all(event in log for event in ("started", "reload_failed", "reloaded", "stopped"))
    private = [line for line in key.read_text().splitlines() if "-----" not in line]
    for text in (log, command_line, *(reply.body.decode("utf-8", "replace") for reply in answers)):
        for secret in (*by_name.values(), *private):
            assert secret.removeprefix(PREFIX)[:20] not in text
