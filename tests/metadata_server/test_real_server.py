"""Real server processes: kill -9 under load, ends in good order, and the whole conformance
suite."""

from __future__ import annotations

import http.client
import random
import signal
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from hicache_conformance.protocol.v2_client import V2Scope
from tests.conformance.metadata.judging import broken, conforms_entirely, errors, judged
from tests.metadata_server.servers import DURABLE, SERVE, Served, served
from tests.metadata_server.token_files import write_tokens
from tests.metadata_server.writers import SLOTS, Writer, check_kept

pytestmark = pytest.mark.slow(seconds=116)

# A lease that ends before it is committed would be no loss.
LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 0.2 --lease-seconds 300"


@pytest.mark.parametrize("seed", range(3))
def test_every_acknowledged_change_survives_kill_9(seed):
    chance = random.Random(seed)
    with served(LASTING) as (place, client):
        scope = V2Scope(client, "0:kv", SLOTS, 4096, chance)
        scope.initialize()
        writers = [Writer(place.url, number) for number in range(3)]
        for writer in writers:
            writer.start()
        time.sleep(chance.uniform(0.3, 1.5))
        place.kill()
        for writer in writers:
            writer.join()
        place.start()
        client.http.drop()
        assert all(writer.live or writer.unsure for writer in writers), (
            "a writer got nothing done before the kill"
        )
        check_kept(scope, writers)


def test_sigterm_answers_what_was_accepted_and_keeps_it():
    with served() as (place, client):
        scope = V2Scope(client, "0:kv", SLOTS, 4096, random.Random(1))
        scope.initialize()
        pages = scope.store(["a", "b"])
        place._process.send_signal(signal.SIGTERM)
        place._process.wait(60)
        place.kill()
        place.start()
        client.http.drop()
        assert scope.lookup(["a", "b"]).slots == [page.slot for page in pages]


def test_a_second_server_on_the_same_store_says_so(tmp_path):
    command = f"{SERVE} --store sqlite:///{tmp_path}/m.db"
    with served(command):
        from hicache_conformance.protocol.server import CannotStartError

        with (
            pytest.raises(CannotStartError, match="another server has this store"),
            Served(command=command),
        ):
            pass


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens", a="admin all", b="read look", c="write write")


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in (2, 3))]
)
def test_our_server_conforms_with_nothing_untested(seed, tokens):
    command = f"{DURABLE} --token-file {tokens}"
    conforms_entirely(judged(start_server=command, seed=seed, tokens=True))


@pytest.mark.long
def test_with_fsync_too():
    judgement = judged(
        start_server=f"{DURABLE} --durability machine",
        seed=4,
        cases=["restart", "kill", "retry", "history", "histories"],
    )
    assert errors(judgement) == []
    assert broken(judgement) == {}


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
@pytest.mark.parametrize("with_length", [False, True])
def test_head_is_answered_like_get_without_a_body(place_of_all, path, with_length):
    """Load balancers ask so; the connection goes on, which a body that nobody expects would
    spoil."""
    host = urlsplit(place_of_all.url)
    with closing(http.client.HTTPConnection(host.hostname, host.port, timeout=30)) as connection:
        for method in ("HEAD", "GET", "HEAD"):
            connection.request(method, path, headers={"Content-Length": "0"} if with_length else {})
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200
            assert bool(body) == (method == "GET")
            assert int(response.headers["content-length"]) > 0


@pytest.fixture(scope="module")
def place_of_all():
    with served(SERVE) as (place, _):
        yield place
