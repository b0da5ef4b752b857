"""`hicache conformance metadata`, as its users see it."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hicache_conformance.cli import app
from hicache_conformance.protocol.http_client import HttpClient, Unanswered
from hicache_conformance.protocol.server import CannotStartError, Served
from tests.conformance.metadata.judging import listening

ROOT = Path(__file__).parents[3]
SERVE = f"{sys.executable} -m tests.conformance.metadata.reference_server --port {{port}}"


@dataclass(frozen=True)
class Ran:
    status: int
    output: str


@pytest.fixture
def hicache(monkeypatch):
    """Run the command, where the reference server can be imported by what it starts."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Ran:
        done = CliRunner().invoke(app, arguments)
        return Ran(done.exit_code, done.output)

    return run


def test_a_conforming_server(hicache, tmp_path):
    with listening() as url:
        done = hicache(
            "metadata",
            "--url",
            url,
            "--level",
            "core",
            "--case",
            "a_new_scope",
            "--case",
            "initializing_again",
            "--case",
            "another_size",
            "--seed",
            "7",
            "--report",
            str(tmp_path),
        )
    report = json.loads((tmp_path / "results.json").read_text())
    # Most cases were left out by name: their rules are untested, and nothing is conformant without
    # them.
    assert done.status == 1
    assert report["verdict"] == "incomplete"
    assert report["contract"] == "HiCache metadata"
    assert report["driver"]["name"] == url
    outcomes = {rule["id"]: rule["outcome"] for rule in report["rules"] if rule["selected"]}
    assert outcomes["MD-INIT-1"] == outcomes["MD-INIT-2"] == "pass"
    assert outcomes["MD-AUTH-1"] == "untested"
    assert "HiCache metadata v2" in (tmp_path / "index.html").read_text()
    assert json.loads((tmp_path / "badge.json").read_text())["label"] == "HiCache metadata v2"


def test_a_whole_level_conforms(hicache):
    done = hicache(
        "metadata",
        "--start-server",
        f"{SERVE} --journal {{tmp}}/journal",
        "--level",
        "budget",
        "--seed",
        "7",
    )
    assert done.status == 0, done.output
    assert "conformant" in done.output


def test_a_faulty_server_and_the_way_to_see_it_again(hicache, tmp_path):
    serve = f"{SERVE} --fault BreaksWhenFull"
    done = hicache(
        "metadata",
        "--start-server",
        serve,
        "--part",
        "compatible",
        "--case",
        "does_not_fit",
        "--seed",
        "7",
        "--report",
        str(tmp_path),
    )
    assert done.status == 1
    assert "MD-RES-2" in done.output
    assert "non-conformant" in done.output
    page = (tmp_path / "index.html").read_text()
    assert "hicache conformance metadata --start-server" in page
    assert "--seed 7 --case &#39;test_a_batch_that_does_not_fit&#39;" in page


def test_without_a_native_part_it_is_not_declared(hicache, tmp_path):
    with listening("SpeaksTheOldPartOnly") as url:
        done = hicache(
            "metadata",
            "--url",
            url,
            "--level",
            "core",
            "--case",
            "lookups",
            "--case",
            "extreme",
            "--report",
            str(tmp_path),
        )
    report = json.loads((tmp_path / "results.json").read_text())
    assert {rule["outcome"] for rule in report["rules"] if rule["id"] == "MD-LOOK-1"} == {
        "not declared"
    }
    assert "the server does not declare native" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "either --url of a server that runs, or --start-server"),
        (("--url", "http://localhost:1", "--start-server", "x {port}"), "either --url"),
        (("--url", "localhost:18000"), "no http or https address"),
        (("--start-server", "sleep 5"), "needs {port}"),
        (("--url", "http://127.0.0.1:9", "--part", "old"), "unknown part 'old'"),
        (
            ("--url", "http://127.0.0.1:9", "--level", "stream"),
            "no rule of the protocol is of level stream",
        ),
        (("--url", "http://127.0.0.1:9"), "nothing answers"),
        (("--start-server", "false {port}"), "ended with 1"),
        (("--start-server", "no-such-program {port}"), "cannot run"),
    ],
)
def test_what_cannot_begin(hicache, arguments, said):
    done = hicache("metadata", *arguments)
    assert done.status == 2
    assert said in " ".join(done.output.split())


def test_a_server_that_wants_a_token(hicache):
    with listening(tokens=True) as url:
        done = hicache("metadata", "--url", url)
    assert done.status == 2
    assert "without --token" in " ".join(done.output.split())


def test_rules_are_listed_and_explained(hicache):
    listed = hicache("rules", "--metadata").output
    assert "MD-HTTP-1" in listed
    assert "MD-AUTH-2" in listed
    assert "GET-1" not in listed
    explained = hicache("explain", "md-res-4").output
    assert "test_two_clients_reserve_one_key" in explained
    assert "one reservation at most" in " ".join(explained.split())


def test_a_killed_server_is_gone_and_comes_back():
    with Served(command=SERVE) as place, closing(HttpClient(place.url)) as http:
        assert http.get("/healthz").status == 200
        place.kill()
        assert not place.is_running()
        with pytest.raises(Unanswered):
            http.get("/healthz")
        place.start()
        assert http.get("/healthz").status == 200
    assert not place.is_running()


def test_a_server_that_does_not_come_up_says_why(tmp_path):
    script = tmp_path / "server.py"
    script.write_text("import sys; print('no database at', sys.argv[1]); sys.exit(3)")
    with (
        pytest.raises(CannotStartError, match="ended with 3 at its start: no database"),
        Served(command=f"{sys.executable} {script} {{port}}"),
    ):
        pass
