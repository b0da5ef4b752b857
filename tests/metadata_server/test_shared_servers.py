"""Real server processes on a real Redis: the whole conformance suite, and kill -9 of servers and of
Redis under load."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, suppress

import pytest

from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import HttpClient
from hicache_conformance.protocol.v2_client import V2Client, V2Scope
from tests.conformance.metadata.judging import conforms_entirely, judged
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.servers import SERVE, Served
from tests.metadata_server.token_files import write_tokens
from tests.metadata_server.writers import SLOTS, Writer, check_kept

pytestmark = pytest.mark.slow(seconds=79)

SHARED = f"{SERVE} --quarantine-seconds 0.2 --lease-seconds 3"


def conforms(url, seed, tmp_path):
    tokens = write_tokens(
        tmp_path / "tokens.json", all="admin all", look="read look", write="write write"
    )
    command = f"{SHARED} --store {url} --token-file {tokens}"
    conforms_entirely(judged(start_server=command, seed=seed, tokens=True))


@pytest.mark.long
def test_a_server_on_a_shared_store_conforms_with_nothing_untested(tmp_path):
    with redis_server(tmp_path, appendonly="yes", appendfsync="no") as redis:
        conforms(redis.url, 1, tmp_path)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", [2, 3])
def test_one_on_a_cluster_does_too(tmp_path, seed):
    with redis_cluster(tmp_path, appendonly="yes", appendfsync="no") as cluster:
        conforms(cluster.url, seed, tmp_path)


class SharedWriter(Writer):
    """Ends where it is refused as well, which a server does while Redis is gone."""

    def run(self):
        with suppress(Violation):
            super().run()


@pytest.mark.parametrize("killed", ["a server", "redis"])
def test_every_acknowledged_change_survives_kill_9(tmp_path, killed):
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path, appendonly="yes", appendfsync="always"))
        command = f"{SERVE} --quarantine-seconds 0.2 --lease-seconds 300 --store {redis.url} --durability machine"
        places = [stack.enter_context(Served(command=command)) for _ in range(2)]
        scopes = []
        for place in places:
            wire = HttpClient(place.url)
            stack.callback(wire.close)
            scopes.append(V2Scope(V2Client(wire), "0:kv", SLOTS, 4096, random.Random(1)))
        scopes[0].initialize()
        writers = [SharedWriter(places[number % 2].url, number) for number in range(3)]
        for writer in writers:
            writer.start()
        until(lambda: all(len(writer.live) > 200 for writer in writers))
        if killed == "redis":
            redis.kill()
        else:
            # The owner: it has made the scope.
            places[0].kill()
        for writer in writers:
            writer.join()
        if killed == "redis":
            redis.start()
        until(lambda: scopes[1].client.http.get("/readyz").status == 200)
        body = {"scopes": [{"scope": "0:kv", "keys": []}]}
        until(lambda: is_served(scopes[1].client.http, body))
        check_kept(scopes[1], writers)


def is_served(wire, body):
    with suppress(Violation):
        return wire.post("/v2/touch", body).status == 200
    return False


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
