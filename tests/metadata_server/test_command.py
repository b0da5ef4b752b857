"""`hicache metadata`, as operators see it."""

from __future__ import annotations

import msgspec
import pytest

from hicache_metadata_server.settings import ServerSettings, misspelt
from tests.metadata_server.servers import DURABLE, served
from tests.metadata_server.token_files import write_tokens
from tests.support.commands import run_hicache, run_metadata, run_python


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokens")
    write_tokens(tokens / "server", operator="admin all", reader="read look")
    (tokens / "client").write_text("all\n")
    (tokens / "reader").write_text("look\n")
    with served(f"{DURABLE} --token-file {tokens / 'server'}", "all") as (place, client):
        client.http.post("/0/initialize", {"num_pages": 50})
        client.http.post("/0/reserve_and_allocate_page_indices", {"keys": [["k", ""]]})
        yield place.url, str(tokens / "client"), str(tokens / "reader")


def test_looking_after_a_server(place):
    url, token, _ = place
    where = ("--url", url, "--token-file", token)
    status = run_metadata("status", "--wait", "30", *where)
    assert status.exit_code == 0, status.output
    assert "durability process" in status.output
    assert "1 scopes, 0 live pages of 50 slots" in status.output
    listed = run_metadata("scopes", *where, env={"COLUMNS": "150"})
    assert "0:kv" in listed.output
    inspected = run_metadata(
        "inspect", "0:kv", "--key", "k", "--key", "none", "--slot", "49", *where
    )
    slot, held, nothing = map(msgspec.json.decode, inspected.output.splitlines())
    assert (slot["state"], held["key"], nothing) == ("free", "k", None)
    assert run_metadata("fsck", *where).exit_code == 0
    assert run_metadata("fsck", "0:kv", *where).exit_code == 0
    drained = run_metadata("drain", *where)
    assert "draining; 1 leases left" in drained.output
    assert drained.exit_code == 1
    assert run_metadata("status", *where).exit_code == 1
    assert "draining; 0 leases left" in run_metadata("drain", "--wait", "20", *where).output
    drained = run_metadata("status", "--json", *where)
    told = msgspec.json.decode(drained.output)
    assert (drained.exit_code, told["ready"], "drains" in told["problem"]) == (1, False, True)
    assert (told["durability"], told["scopes"], told["slots"]) == ("process", 1, 50)
    assert run_metadata("drain", "--off", *where).output == "gives leases\n"
    assert run_metadata("status", *where).exit_code == 0


def test_scopes_are_listed_and_emptied(place):
    url, token, reader = place
    where = ("--url", url, "--token-file", token)
    [listed] = map(
        msgspec.json.decode, run_metadata("scopes", "--json", *where).output.splitlines()
    )
    assert (listed["scope"], listed["slots"], listed["tenant"]) == ("0:kv", 50, "")
    clear = ("scopes", "clear", "--yes")
    assert run_metadata(*clear, "0:kv", *where).output == "0:kv: 0 pages removed\n"
    for arguments, said in (
        (("scopes", "clear", "0:kv", *where), "Remove all pages of 0:kv? Say so with --yes"),
        (("scopes", "delete", "--force", "0:kv", *where), "with all pages? Say so with --yes"),
        ((*clear, *where), "--model NAME"),
        ((*clear, "0:kv", "--model", "m", *where), "--model NAME"),
        ((*clear, "--model", "m", *where), "no scope has the model 'm'; there are []"),
        ((*clear, "0:none", *where), "scope '0:none' is not initialized"),
        (
            (*clear, "0:kv", "--url", url, "--token-file", reader),
            "permits read, and that needs write",
        ),
        ((*clear, "0:kv", "--url", "http://127.0.0.1:1"), "does not answer"),
    ):
        done = run_metadata(*arguments)
        assert done.exit_code == 2, arguments
        assert said in " ".join(done.output.split()), arguments


def test_scopes_are_named_by_their_model():
    with served() as (place, client):
        where = ("--url", place.url)
        for rank in range(2):
            client.http.post(f"/{rank}/initialize", {"num_pages": 50})
            client.http.post(
                f"/{rank}/reserve_and_allocate_page_indices", {"keys": [[f"k{rank}", ""]]}
            )
            client.http.post("/v2/describe", {"scope": f"{rank}:kv", "model": "org/[bold]model[/]"})
        client.http.post("/2/initialize", {"num_pages": 50, "namespace": "n" * 100})
        # A name is a line, whatever the width of the terminal.
        listed = run_metadata("scopes", *where, env={"COLUMNS": "20"}).output.splitlines()
        assert [line.split()[0] for line in listed] == ["scope", "0:kv", "1:kv", "2:" + "n" * 100]
        assert listed[1].rstrip().endswith("org/[bold]model[/]")
        listed = map(
            msgspec.json.decode, run_metadata("scopes", "--json", *where).output.splitlines()
        )
        assert [scope["model"] for scope in listed] == ["org/[bold]model[/]"] * 2 + [""]
        model = ("--model", "org/[bold]model[/]", *where)
        found = run_metadata("inspect", "--key", "k1", *model).output.splitlines()
        first, second = map(msgspec.json.decode, found)
        assert first == {"scope": "0:kv", "found": None}
        assert (second["scope"], second["found"]["key"]) == ("1:kv", "k1")
        cleared = run_metadata("scopes", "clear", "--yes", *model)
        assert cleared.output == "0:kv: 0 pages removed\n1:kv: 0 pages removed\n"


def test_refusals_are_sentences(place):
    url, token, reader = place
    for arguments, said in (
        (
            ("scopes", "--url", url),
            (
                "needs a bearer token that it knows (header Authorization: Bearer TOKEN) (401 "
                "unauthorized); --token-file FILE"
            ),
        ),
        (("drain", "--url", url, "--token-file", reader), "permits read, and that needs admin"),
        (
            ("inspect", "9:kv", "--url", url, "--token-file", token),
            "scope '9:kv' is not initialized",
        ),
        (("inspect", "nonsense", "--url", url, "--token-file", token), "422"),
        (("status", "--url", "http://127.0.0.1:9"), "does not answer"),
        (("status", "--wait", "0.2", "--url", "http://127.0.0.1:9"), "does not answer"),
        (("status", "--url", "ftp://x"), "no http or https address"),
        (("fsck", "--store", "memory:"), "is no sqlite:///FILE"),
        (("fsck", "--store", "nowhere"), "is no sqlite:///FILE"),
        (("status", "--url", url, "--token-file", "/nonexistent"), "No such file"),
    ):
        done = run_metadata(*arguments)
        assert done.exit_code == 2, done.output
        assert said in " ".join(done.output.split()), arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--store", "mysql://x"), "is not the address of a store"),
        (("--store", "redis://127.0.0.1:1"), "redis://127.0.0.1:1: "),
        (("--store", "redis+cluster://x"), "is no HOST:PORT"),
        (("--store", "sqlite:////nonexistent/m.db"), "there is no directory /nonexistent: make it"),
        (("--lease-seconds", "10000"), "lease_seconds must lie between"),
        (("--durability", "hope"), "durability"),
        (("--port", "99999"), "port"),
        (("--tls-certificate", "x.pem"), "a certificate and a key"),
        (("--token-file", "/nonexistent"), "No such file"),
    ],
)
def test_settings_that_cannot_be(arguments, said):
    done = run_metadata("serve", *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.long
def test_settings_are_checked_without_a_start(tmp_path, monkeypatch):
    tokens, store = (
        write_tokens(tmp_path / "tokens.json", a="read one"),
        f"sqlite:///{tmp_path}/m.db",
    )
    monkeypatch.setenv("HICACHE_METADATA_QUARANTINE_SECOND", "1")

    def checked(*arguments):
        # In a process of its own, whose log is its own, too.
        return run_hicache("metadata", "config", *arguments)

    done = checked("--store", store, "--token-file", str(tokens), "--log-format", "json")
    assert (done.returncode, done.stdout) == (1, "a server would start with these settings\n"), (
        done.stderr
    )
    logged, said = done.stderr.splitlines()
    assert msgspec.json.decode(logged)["event"] == "unknown_setting"
    assert said == (
        "HICACHE_METADATA_QUARANTINE_SECOND is no setting: HICACHE_METADATA_QUARANTINE_SECONDS is"
    )
    assert list(tmp_path.iterdir()) == [tokens], "nothing was made"
    monkeypatch.delenv("HICACHE_METADATA_QUARANTINE_SECOND")
    done = checked()
    assert done.returncode == 0
    assert [msgspec.json.decode(line)["event"] for line in done.stderr.splitlines()] == [
        "no_store"
    ], "memory: is the default, and a restart forgets it"
    for arguments, said in (
        (("--store", f"sqlite:///{tmp_path}/nowhere/m.db"), "there is no directory"),
        (("--store", store, "--token-file", str(tmp_path / "none")), "No such file"),
        (("--store", f"sqlite:///{tokens}"), "is not a database"),
        (("--store", "redis://127.0.0.1:1", "--port", "0"), "advertised_url: needed with port 0"),
    ):
        done = checked(*arguments)
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split()), done.stderr


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("HICACHE_METADATA_STORE", "sqlite:///x.db")
    monkeypatch.setenv("HICACHE_METADATA_LEASE_SECONDS", "50")
    monkeypatch.setenv("HICACHE_METADATA_ADMIN_TOKEN", "secret")
    settings = ServerSettings(port=5)
    assert (settings.store, settings.limits.lease_seconds, settings.port) == (
        "sqlite:///x.db",
        50,
        5,
    )
    assert settings.tokens() == {"secret": "admin"}
    assert "secret" not in repr(settings)


def test_variables_that_are_no_settings_are_noticed():
    found = misspelt(
        [
            "HICACHE_METADATA_QUARANTINE_SECOND",
            "HICACHE_METADATA_TOKEN",
            "HICACHE_METADATA_PORT",
            "HICACHE_METADATA_X9",
            "HOME",
        ]
    )
    assert list(found) == [
        ("HICACHE_METADATA_QUARANTINE_SECOND", "HICACHE_METADATA_QUARANTINE_SECONDS"),
        ("HICACHE_METADATA_X9", ""),
    ]


def test_the_state_machine_needs_no_server():
    """The driver's local client uses it in processes that have neither Starlette nor SQLite open."""
    script = (
        "import sys, hicache_metadata_server.core.service, hicache_metadata_server.core.sglang, "
        "hicache_metadata_server.cli.main\n"
        "heavy = {'starlette', 'uvicorn', 'pydantic', 'prometheus_client', 'structlog', 'sqlite3', "
        "'torch'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    run_python(script)
