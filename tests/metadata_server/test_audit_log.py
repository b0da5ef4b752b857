"""Audit log; and no secret in anything that a server writes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hicache_backends.hf3fs.config import Hf3fsConfig
from hicache_metadata_server.auth.audit_log import BURST, AuditLog
from hicache_metadata_server.auth.token_file import PREFIX, edit_token_file, new_token, record_of
from hicache_metadata_server.client.tls import client_context
from hicache_metadata_server.core.tenants import Caller
from hicache_metadata_server.logs import configure_logs
from hicache_metadata_server.settings import ServerSettings
from tests.metadata_server.certificates import Authority
from tests.metadata_server.every_route import SCOPE, ask, every_route, prepared
from tests.metadata_server.http_calls import audit_to, running
from tests.metadata_server.servers import DURABLE, Served
from tests.metadata_server.test_refusals import bearer, guarded
from tests.support.metadata import HttpClient


def lines(file):
    return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]


async def test_who_has_done_what(tmp_path):
    async with running(**guarded(tmp_path, "acme", "")) as caller:
        lease, pin = await prepared(caller, bearer("write-acme"))
        assert lines(tmp_path / "audit") == []
        for asked in every_route(lease=lease, pin=pin):
            await ask(caller, asked, bearer("admin-"))
        await caller.post("/v2/clear", {"scopes": ["9:kv"]}, headers=bearer("admin-"))
        await caller.send("POST", "/v2/drain", b"{", headers=bearer("admin-"))
        await caller.post("/v2/drain", {"enabled": False}, headers=bearer("admin-acme"))
        await caller.post("/v2/drain", {"enabled": False}, headers=bearer("read-acme"))
        await caller.post("/v2/drain", {"enabled": False}, headers=bearer("nobody"))
    found = lines(tmp_path / "audit")
    operator = {"token": "admin-", "tenant": "", "peer": "test:1"}
    assert [line for line in found if line["event"] == "request"] == [
        {"event": "request", **operator, "route": "/v2/clear", "scopes": [SCOPE], "status": 200},
        {"event": "request", **operator, "route": "/v2/drop", "scopes": [SCOPE], "status": 409},
        {"event": "request", **operator, "route": "/v2/fsck", "scopes": [SCOPE], "status": 200},
        {"event": "request", **operator, "route": "/v2/drain", "enabled": True, "status": 200},
        {
            "event": "request",
            **operator,
            "route": "/{rank}/clear",
            "scopes": [SCOPE],
            "status": 204,
        },
        {"event": "request", **operator, "route": "/v2/clear", "scopes": ["9:kv"], "status": 404},
        {"event": "request", **operator, "route": "/v2/drain", "status": 400},
    ]
    refused = {"event": "refused", "peer": "test:1", "route": "/v2/drain"}
    assert [line for line in found if line["event"] == "refused"] == [
        {**refused, "token": "admin-acme", "tenant": "acme", "status": 403, "code": "forbidden"},
        {**refused, "token": "read-acme", "tenant": "acme", "status": 403, "code": "forbidden"},
        {**refused, "token": "", "tenant": "", "status": 401, "code": "unauthorized"},
    ]


def test_many_refusals_are_some_lines_and_a_number(tmp_path):
    now = [0.0]
    audit = audit_to(tmp_path / "audit", clock=lambda: now[0])
    for port in range(1000):
        audit.refused("/v2", 401, "unauthorized", None, f"10.0.0.1:{port}")
    audit.refused("/v2", 401, "unauthorized", None, "10.0.0.2:1")
    now[0] = 1.0
    audit.refused("/v2", 401, "unauthorized", None, "10.0.0.1:1")
    found = lines(tmp_path / "audit")
    assert [line["peer"].partition(":")[0] for line in found] == ["10.0.0.1"] * int(BURST) + [
        "10.0.0.2",
        "10.0.0.1",
    ]
    assert [line.get("not_written", 0) for line in found] == [0] * (int(BURST) + 1) + [1000 - BURST]


async def test_what_clients_send_is_bounded(tmp_path):
    async with running(**guarded(tmp_path, "")) as caller:
        names = [f"{number}:{'x' * 128}" for number in range(64)]
        await caller.post("/v2/clear", {"scopes": names}, headers=bearer("admin-"))
        await caller.post("/v2/fsck", {"scopes": ["y" * 100_000]}, headers=bearer("admin-"))
        await caller.send("GET", "/" + "z" * 100_000)
    first, second, third = (tmp_path / "audit").read_bytes().splitlines()
    assert msgspec.json.decode(first)["scopes_in_all"] == 64
    assert len(first) < 3000
    assert len(second) < 300
    assert len(third) < 300


@pytest.mark.parametrize("level", ["info", "error"])
def test_the_logger_has_a_name_of_its_own_and_a_level_that_no_setting_changes(capsys, level):
    configure_logs(level, "json")
    audit = AuditLog()
    audit.request("/v2/drain", 200, Caller("operator"), "10.0.0.1:1", {"enabled": True})
    audit.refused("/v2", 401, "unauthorized", None, "10.0.0.1:1")
    audit.write("reload", what="tokens", result="done", reason="")
    told = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["event"]) for line in told] == [
        ("hicache.audit", "request"),
        ("hicache.audit", "refused"),
        ("hicache.audit", "reload"),
    ]
    assert told[2]["what"] == "tokens"


@pytest.mark.parametrize("form", ["json", "console"])
async def test_the_trace_of_a_fault_shows_no_token(tmp_path, form, capsys):
    configure_logs("debug", form)

    async with running(**guarded(tmp_path, "")) as caller:
        caller.service.tenants.of_scope = None
        reply = await caller.post(
            "/v2/lookup",
            {"scopes": [{"scope": SCOPE, "keys": ["k"]}]},
            headers=bearer("write-"),
        )
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


class Given:
    """A server with every kind of secret, and all that it writes."""

    def __init__(self, directory):
        self.directory = directory
        self.tokens = directory / "tokens.json"
        self.by_name = {
            name: new_token()
            for name in ("read", "write", "admin", "env", "acme", "late", "later", "never")
        }
        certificate, key = Authority(directory).sign("server")
        self.secrets = [
            *self.by_name.values(),
            *[line for line in key.read_text().splitlines() if "-----" not in line],
        ]
        with edit_token_file(self.tokens) as records:
            for name in ("read", "write", "admin"):
                records[name] = record_of(self.by_name[name], name, name=name)
            records["acme"] = record_of(self.by_name["acme"], "admin", name="acme", tenant="acme")
        (directory / "quotas").write_text("[default]\nmax_scopes = 3\n")
        self.place = Served(
            command=f"{DURABLE} --log-level debug --token-file {self.tokens} "
            f"--log-format json --tls-certificate {certificate} "
            f"--tls-key {key} --tenants-file {directory / 'quotas'}"
        )

    def audited(self):
        found = [line for line in self.place.log().splitlines() if '"hicache.audit"' in line]
        return list(map(msgspec.json.decode, found))

    def wire(self, token):
        trusting = client_context(ca=str(self.directory / "authority.pem"))
        return HttpClient(self.place.url, token, tls=trusting)


@pytest.mark.long
def test_nothing_that_a_server_writes_holds_a_secret(tmp_path, monkeypatch):
    given = Given(tmp_path)
    monkeypatch.setenv("HICACHE_METADATA_ADMIN_TOKEN", given.by_name["env"])
    with given.place as place:
        answers = list(everything_asked(given))
        spoil(given)
        answers += [
            reply for name in ("env", "later") for reply in asked_by(given, given.by_name[name])
        ]
        command_line = Path(f"/proc/{place.process.pid}/cmdline").read_text()
        os.kill(place.process.pid, signal.SIGTERM)
        place.process.wait(30)
        audited, texts = given.audited(), [place.log(), command_line]
        texts += [reply.body.decode("utf-8", "replace") for reply in answers]
    statuses = {reply.status for reply in answers}
    assert statuses >= {200, 204, 400, 401, 403, 404}, statuses
    assert all(event in texts[0] for event in ("started", "reload_failed", "reloaded", "stopped"))
    assert {line["event"] for line in audited} == {"request", "refused", "reload"}
    for text in texts:
        for secret in given.secrets:
            assert secret not in text
            assert secret.removeprefix(PREFIX)[:20] not in text


def everything_asked(given):
    for token in [*given.by_name.values(), "", "Bearer"]:
        yield from asked_by(given, token)


def asked_by(given, token):
    """All routes, and requests with the token in the wrong place."""
    with closing(given.wire(token)) as wire:
        for asked in every_route(lease=1, pin=1):
            yield wire.send(
                asked.method,
                asked.path,
                None if asked.body is None else msgspec.json.encode(asked.body),
            )
        for path in (
            f"/{token}",
            f"/0/{token}",
            f"/v2/{token}",
            f"/v2?token={token}",
            f"/0/exists?{token}",
            "/healthz",
            "/readyz",
        ):
            wire.send("GET", path, None)
            wire.send("POST", path, b"{")
        yield wire.send("POST", "/v2/lookup", b"{")
        wire.send("POST", "/v2/lookup", token.encode())
        wire.send(
            "GET",
            "/v2",
            None,
            headers={"X-Token": token, "Cookie": token, "Idempotency-Key": token},
        )


def spoil(given):
    """Files that are bad, with tokens in them where none belong, then a good one."""
    good = given.tokens.read_bytes()
    for bad in (
        f"write {given.by_name['never']}\n",
        f'{{"version": 1, "tokens": ["{given.by_name["never"]}"]}}',
    ):
        until_audited(given, partial(given.tokens.write_text, bad), "failed")
    given.tokens.write_bytes(good)
    with edit_token_file(given.tokens) as records:
        records["later"] = record_of(given.by_name["later"], "write", name="later")
    until_audited(given, lambda: os.kill(given.place.process.pid, signal.SIGHUP), "done")


def until_audited(given, change, result):
    def seen():
        return sum(
            line["event"] == "reload" and line["result"] == result for line in given.audited()
        )

    before = seen()
    change()
    until = time.monotonic() + 30
    while seen() == before:
        assert time.monotonic() < until
        time.sleep(0.05)
