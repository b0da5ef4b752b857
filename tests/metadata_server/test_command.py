"""`hicache metadata`, as operators see it."""

from __future__ import annotations

import msgspec
import pytest

from hicache_metadata_server.settings import ServerSettings, misspelt
from tests.metadata_server.servers import SERVE, served
from tests.metadata_server.token_files import write_tokens
from tests.support.commands import run_hicache, run_metadata


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokens")
    write_tokens(tokens / "server", operator="admin all", reader="read look")
    (tokens / "client").write_text("all\n")
    (tokens / "reader").write_text("look\n")
    lasting = f"{SERVE} --store sqlite:///{{tmp}}/m.db --lease-seconds 300"
    with served(f"{lasting} --token-file {tokens / 'server'}", "all") as (place, client):
        client.post("/0/initialize", {"num_pages": 50})
        client.post("/0/reserve_and_allocate_page_indices", {"keys": [["k", ""]]})
        yield place.url, str(tokens / "client"), str(tokens / "reader")


def said(*arguments, **options):
    """Exit status of a command, and what it printed on one line."""
    done = run_metadata(*arguments, **options)
    return done.exit_code, " ".join(done.output.split())


def told(*arguments, **options):
    """The lines of JSON that a command prints."""
    return list(map(msgspec.json.decode, run_metadata(*arguments, **options).output.splitlines()))


def test_looking_after_a_server(place):
    """MD-OPS-3 among others."""
    url, token, _ = place
    where = ("--url", url, "--token-file", token)
    status, text = said("status", "--wait", "30", *where)
    assert (status, "durability process" in text) == (0, True)
    assert "1 scopes, 0 live pages of 50 slots" in text
    assert "0:kv" in said("scopes", *where, env={"COLUMNS": "150"})[1]
    keys = ("--key", "k", "--key", "none", "--slot", "49")
    slot, held, nothing = told("inspect", "0:kv", *keys, *where)
    assert (slot["state"], held["key"], nothing) == ("free", "k", None)
    checked = (0, "50 slots checked, no problems")
    assert said("fsck", *where) == said("fsck", "0:kv", *where) == checked
    for wait in ("0", "0.1"):
        assert said("drain", "--wait", wait, *where) == (1, "draining; 1 leases left")
    assert said("status", *where)[0] == 1
    assert said("scopes", "clear", "--yes", "0:kv", *where)[0] == 0
    assert said("drain", "--wait", "20", *where) == (0, "draining; 0 leases left")
    drained = run_metadata("status", "--json", *where)
    found = msgspec.json.decode(drained.output)
    assert (drained.exit_code, found["ready"], "drains" in found["problem"]) == (1, False, True)
    assert (found["durability"], found["scopes"], found["slots"]) == ("process", 1, 50)
    assert said("drain", "--off", *where) == (0, "gives leases")
    assert said("status", *where)[0] == 0


def test_scopes_are_named_by_their_model():
    name = "org/[bold]model[/]"
    with served() as (place, client):
        where = ("--url", place.url)
        for rank in range(2):
            client.post(f"/{rank}/initialize", {"num_pages": 50})
            asked = {"keys": [[f"k{rank}", ""]]}
            client.post(f"/{rank}/reserve_and_allocate_page_indices", asked)
            client.post("/v2/describe", {"scope": f"{rank}:kv", "model": name})
        client.post("/2/initialize", {"num_pages": 50, "namespace": "n" * 100})
        # A name is a line, whatever the width of the terminal.
        listed = run_metadata("scopes", *where, env={"COLUMNS": "20"}).output.splitlines()
        assert [line.split()[0] for line in listed] == ["scope", "0:kv", "1:kv", "2:" + "n" * 100]
        assert listed[1].rstrip().endswith(name)
        listed = told("scopes", "--json", *where)
        assert [scope["model"] for scope in listed] == [name, name, ""]
        first, second = told("inspect", "--key", "k1", "--model", name, *where)
        assert first == {"scope": "0:kv", "found": None}
        assert (second["scope"], second["found"]["key"]) == ("1:kv", "k1")
        cleared = said("scopes", "clear", "--yes", "--model", name, *where)
        assert cleared == (0, "0:kv: 0 pages removed 1:kv: 0 pages removed")


@pytest.mark.parametrize(
    ("who", "command", "reason"),
    [
        ("nobody", "scopes", "needs a bearer token that it knows (header Authorization: Bearer"),
        ("nobody", "scopes", "TOKEN) (401 unauthorized); --token-file FILE"),
        ("reader", "drain", "permits read, and that needs admin"),
        ("reader", "scopes clear --yes 0:kv", "permits read, and that needs write"),
        ("all", "inspect 9:kv", "scope '9:kv' is not initialized"),
        ("all", "inspect nonsense", "422"),
        ("all", "scopes clear 0:kv", "Remove all pages of 0:kv? Say so with --yes"),
        ("all", "scopes delete --force 0:kv", "with all pages? Say so with --yes"),
        ("all", "scopes clear --yes", "--model NAME"),
        ("all", "scopes clear --yes 0:kv --model m", "--model NAME"),
        ("all", "scopes clear --yes --model m", "no scope has the model 'm'; there are []"),
        ("all", "scopes clear --yes 0:none", "scope '0:none' is not initialized"),
        ("", "scopes clear --yes 0:kv --url http://127.0.0.1:1", "does not answer"),
        ("", "status --url http://127.0.0.1:9", "does not answer"),
        ("", "status --wait 0.2 --url http://127.0.0.1:9", "does not answer"),
        ("", "status --url ftp://x", "no http or https address"),
        ("all", "fsck 0:other", "scope '0:other' is not initialized"),
        ("", "fsck 0:kv --store sqlite:///m.db", "checked as a whole"),
        ("", "fsck --store memory:", "is not the address of a store of one server"),
        ("", "fsck --store nowhere", "is not the address of a store of one server"),
        ("nobody", "status --token-file /nonexistent", "No such file"),
        ("", "serve --store mysql://x", "is not the address of a store"),
        ("", "serve --store redis://127.0.0.1:1", "redis://127.0.0.1:1: "),
        ("", "serve --store redis+cluster://x", "is no HOST:PORT"),
        ("", "serve --store sqlite:////nonexistent/m.db", "no directory /nonexistent: make it"),
        ("", "serve --lease-seconds 10000", "lease_seconds must lie between"),
        ("", "serve --durability hope", "durability"),
        ("", "serve --port 99999", "port"),
        ("", "serve --tls-certificate x.pem", "a certificate and a key"),
        ("", "serve --token-file /nonexistent", "No such file"),
    ],
)
def test_refusals_are_sentences(place, who, command, reason):
    url, *tokens = place
    where = {"": (), "nobody": ("--url", url)}
    for name, token in zip(("all", "reader"), tokens, strict=True):
        where[name] = ("--url", url, "--token-file", token)
    status, text = said(*command.split(), *where[who])
    assert (status, reason in text) == (2, True), text


@pytest.mark.long
def test_settings_are_checked_without_a_start(tmp_path, monkeypatch):
    tokens = write_tokens(tmp_path / "tokens.json", a="read one")
    store = f"sqlite:///{tmp_path}/m.db"
    wrong, right = "HICACHE_METADATA_QUARANTINE_SECOND", "HICACHE_METADATA_QUARANTINE_SECONDS"

    def checked(*arguments):
        # In a process of its own, whose log is its own, too.
        return run_hicache("metadata", "config", *arguments)

    monkeypatch.setenv(wrong, "1")
    done = checked("--store", store, "--token-file", str(tokens), "--log-format", "json")
    assert (done.returncode, done.stdout) == (1, "a server would start with these settings\n")
    logged, text = done.stderr.splitlines()
    assert msgspec.json.decode(logged)["event"] == "unknown_setting"
    assert text == f"{wrong} is no setting: {right} is"
    assert list(tmp_path.iterdir()) == [tokens], "nothing was made"
    monkeypatch.delenv(wrong)
    done = checked()
    assert done.returncode == 0
    # memory: is the default, and a restart forgets it.
    [logged] = done.stderr.splitlines()
    assert msgspec.json.decode(logged)["event"] == "no_store"
    done = checked("--store", f"sqlite:///{tokens}")
    assert (done.returncode, "is not a database" in " ".join(done.stderr.split())) == (2, True)


def test_settings_from_the_environment(monkeypatch):
    for name, value in {
        "STORE": "sqlite:///x.db",
        "LEASE_SECONDS": "50",
        "ADMIN_TOKEN": "s",
    }.items():
        monkeypatch.setenv(f"HICACHE_METADATA_{name}", value)
    settings = ServerSettings(port=5)
    assert (settings.store, settings.limits.lease_seconds) == ("sqlite:///x.db", 50)
    assert settings.port == 5
    assert settings.tokens() == {"s": "admin"}


def test_variables_that_are_no_settings_are_noticed():
    names = ["QUARANTINE_SECOND", "TOKEN", "PORT", "X9"]
    found = misspelt([*(f"HICACHE_METADATA_{name}" for name in names), "HOME"])
    right = "HICACHE_METADATA_QUARANTINE_SECONDS"
    assert list(found) == [(right[:-1], right), ("HICACHE_METADATA_X9", "")]
