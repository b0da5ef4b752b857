"""Tokens: the file that holds their digests, the commands that change it, and servers that
notice."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from hicache_metadata_server.auth.access import Tokens
from hicache_metadata_server.auth.files import (
    PREFIX,
    TokenFileError,
    edit_token_file,
    encode_tokens,
    read_token_file,
    record_of,
)
from hicache_metadata_server.auth.security import Security, WatchedFiles
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import ANYBODY
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import Token
from tests.metadata_server.http_calls import audit_to
from tests.metadata_server.token_files import write_tokens
from tests.support.commands import run_metadata


def command(*arguments, **options):
    return run_metadata("token", *arguments, **options)


def made(file, *options):
    done = command("new", "--file", file, *options)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def status(tokens, token):
    try:
        tokens.check(f"Bearer {token}".encode(), Token.READ)
    except RequestError as refused:
        return refused.status
    return 200


def test_a_token_is_told_once_and_only_its_digest_is_kept(tmp_path):
    file = tmp_path / "tokens.json"
    options = ("--right", "write", "--tenant", "acme", "--id", "engine-1", "--expires", "90d")
    token = made(file, *options)
    assert token.startswith(PREFIX)
    assert len(token) >= 43
    assert token not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (record,) = read_token_file(file)
    assert (record.id, record.right, record.tenant) == ("engine-1", "write", "acme")
    assert record.sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert timedelta(days=89) < record.expires - datetime.now(UTC) <= timedelta(days=90)
    assert made(file, "--right", "read") != token
    listed = command("list", "--file", file, env={"COLUMNS": "200"}).output
    assert ("engine-1" in listed, "acme" in listed, token in listed) == (True, True, False)


def test_a_token_in_a_file_is_the_owners_alone(tmp_path):
    file, output, other = (tmp_path / name for name in ("tokens.json", "mine", "other"))
    options = ("--right", "write", "--id", "engines")
    before = os.umask(0)
    try:
        assert made(file, *options, "--output", output) == "", "it is not printed as well"
    finally:
        os.umask(before)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    token = output.read_text()
    assert "engines  write" in command("list", "--file", file, "--token-file", output).output
    again = command("new", "--file", file, "--right", "write", "--output", output)
    assert (again.exit_code, output.read_text()) == (2, token)
    assert "File exists" in " ".join(again.output.split())
    assert [record.id for record in read_token_file(file)] == ["engines"], "nothing was added"
    assert command("new", "--file", file, *options, "--output", other).exit_code == 2
    assert not other.exists()


def test_tokens_are_revoked_at_once_or_after_a_time(tmp_path):
    file = write_tokens(tmp_path / "tokens.json", a="read 1", b="read 2", c="read 3")
    unknown = command("revoke", "a", "nobody", "--file", file)
    assert unknown.exit_code == 2
    assert "nothing was revoked" in " ".join(unknown.output.split())
    assert command("revoke", "a", "--file", file).exit_code == 0
    assert command("revoke", "b", "--after", "24h", "--file", file).exit_code == 0
    b, c = read_token_file(file)
    assert (b.id, c.id, c.expires) == ("b", "c", None)
    assert timedelta(hours=23) < b.expires - datetime.now(UTC) <= timedelta(hours=24)


def test_one_token_is_listed(tmp_path):
    file = write_tokens(tmp_path / "tokens.json", a="write right", b="read late-expired")
    given = tmp_path / "given"
    for token, code, said in (
        ("right", 0, ["a", "write"]),
        ("late-expired", 1, ["b", "read"]),
        ("other", 1, []),
    ):
        given.write_text(f"{token}\n")
        done = command("list", "--file", file, "--token-file", given)
        assert (done.exit_code, done.output.split()[5:7]) == (code, said)
        assert ("expired" in done.output) == (token == "late-expired")
    file.chmod(0o644)
    assert "read by everybody" in " ".join(command("list", "--file", file).output.split())


@pytest.mark.parametrize(
    "options",
    [
        "--right root",
        "--right read --tenant a/b",
        "--right read --id x\n",
        "--right read --expires soon",
        "--right read --expires 2020-01-01",
        "--right read --id taken",
    ],
)
def test_tokens_that_cannot_be_made(tmp_path, options):
    file = write_tokens(tmp_path / "tokens.json", taken="read x")
    before = file.read_bytes()
    assert command("new", "--file", file, *options.split(" ")).exit_code == 2
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["tokens.json"]


def test_files_that_others_may_change_or_that_mean_nothing_are_refused(tmp_path):
    file = write_tokens(tmp_path / "tokens.json", a="read x")
    good = msgspec.json.decode(file.read_bytes())
    for mode in (0o620, 0o602, 0o666):
        file.chmod(mode)
        with pytest.raises(TokenFileError, match="chmod go-w"):
            read_token_file(file)
    file.chmod(0o640)
    assert len(read_token_file(file)) == 1
    [record] = good["tokens"]
    wrong = {"sha256": "abc", "right": "none", "more": 1, "tenant": "a\nb"}
    lists = [[{**record, name: value}] for name, value in wrong.items()]
    lists += [[record, record], [record, {**record, "id": "b"}], 7]
    bodies = [msgspec.json.encode({**good, "tokens": tokens}) for tokens in lists]
    # One in the clear, too, which is not shown.
    for content in (*bodies, b"", b"{", b"\xff", b'{"version": 2, "tokens": []}', b"write secret"):
        file.write_bytes(content)
        with pytest.raises(TokenFileError) as refused:
            read_token_file(file)
        assert "secret" not in str(refused.value)


def test_a_file_keeps_its_mode_and_an_empty_one_is_filled(tmp_path):
    file = tmp_path / "tokens.json"
    file.touch()
    file.chmod(0o644)
    made(file, "--right", "read")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert len(read_token_file(file)) == 1


def test_changes_of_several_at_once_are_all_kept(tmp_path):
    file = tmp_path / "tokens.json"

    def add(name):
        for i in range(5):
            with edit_token_file(file) as tokens:
                tokens[f"{name}-{i}"] = record_of(f"{name}-{i}", "read", name=f"{name}-{i}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_token_file(file)) == 20


def test_tokens_expire_while_the_server_runs():
    now = [1_000.0]
    tokens = Tokens(clock=lambda: now[0])
    tokens.replace_records([record_of("t", "read", expires=datetime.fromtimestamp(1_500, UTC))])
    for at, answer, following in ((1_000.0, 200, 1_500.0), (1_500.0, 401, None)):
        now[0] = at
        assert (status(tokens, "t"), tokens.next_expiry()) == (answer, following)
        valid = int(answer == 200)
        assert tokens.counts() == {"valid": valid, "expired": 1 - valid}


def test_who_asks():
    """With tokens of the environment, too; those of files are asked of every route elsewhere."""
    assert Tokens().check(b"", Token.ADMIN) is ANYBODY
    tokens = Tokens({"e": Token.ADMIN, "r": Token.READ})
    for text, caller in (("e", ("env-admin", "", True)), ("r", ("env-read", "", False))):
        who = tokens.check(b"Bearer " + text.encode(), Token.READ)
        assert (who.token, who.tenant, who.sees_all) == caller
    for token in ("", "e e", "t" * 10_000, "\xff"):
        assert status(tokens, token) == 401
    only_a_file = Tokens()
    only_a_file.replace_records([])
    assert status(only_a_file, "") == 401, "no token at all does not mean that none is asked for"


def test_a_changed_file_is_taken_as_a_whole_or_not_at_all(tmp_path):
    """Whatever of it has changed."""
    file = write_tokens(tmp_path / "tokens.json", a="read one")
    security = Security(MetadataService(), audit=audit_to(tmp_path / "audit"))
    tokens = security.tokens
    watched = WatchedFiles("tokens", [file], lambda: tokens.replace_records(read_token_file(file)))
    security.watched = [watched]
    watched.load()
    security.reload()
    assert watched.loads == 1
    # As long as before, and as old.
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(encode_tokens([record_of("two", "read", name="a")]).ljust(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert status(tokens, "two") == 401
    security.reload()
    assert (status(tokens, "one"), status(tokens, "two")) == (401, 200)
    for mode, problem in ((0o666, True), (0o600, False)):
        file.chmod(mode)
        security.reload()
        assert bool(watched.problem) == problem
    for spoil in (lambda: file.write_bytes(b"{"), lambda: file.write_bytes(b""), file.unlink):
        spoil()
        security.reload()
        assert status(tokens, "two") == 200
        assert watched.problem
    write_tokens(file)
    security.reload()
    assert (status(tokens, "two"), watched.problem) == (401, "")
    lines = [msgspec.json.decode(line) for line in (tmp_path / "audit").read_bytes().splitlines()]
    results = ["done", "failed", "done", *["failed"] * 3, "done"]
    assert [line["result"] for line in lines] == results
