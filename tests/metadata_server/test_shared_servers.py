"""Real server processes on a real Redis: kill -9 of servers and of Redis under load."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, suppress

import pytest

from tests.metadata_server.redis_servers import redis_server
from tests.metadata_server.servers import SERVE, Served
from tests.metadata_server.writers import SLOTS, Writer, check_kept
from tests.support.commands import run_metadata
from tests.support.metadata import HttpClient, Refused, V2Scope
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=10)


class SharedWriter(Writer):
    """Ends where it is refused as well, which a server does while Redis is gone."""

    def run(self):
        with suppress(Refused):
            super().run()


@pytest.mark.parametrize("killed", ["a server", "redis"])
def test_every_acknowledged_change_survives_kill_9(tmp_path, killed):
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path, appendonly="yes", appendfsync="always"))
        command = f"{SERVE} --quarantine-seconds 0.2 --lease-seconds 300 --store {redis.url} --durability machine"
        places = [stack.enter_context(Served(command=command)) for _ in range(2)]
        scopes = [scope_of(HttpClient(place.url)) for place in places]
        scopes[0].initialize()
        writers = [SharedWriter(places[number % 2].url, number) for number in range(3)]
        for writer in writers:
            writer.start()
        eventually(lambda: all(len(writer.live) > 200 for writer in writers))
        if killed == "redis":
            redis.kill()
        else:
            # The owner: it has made the scope.
            places[0].kill()
        for writer in writers:
            writer.join()
        if killed == "redis":
            redis.start()
        eventually(lambda: is_served(scopes[1]))
        check_kept(scopes[1], writers)


def test_status_lists_the_servers(tmp_path):
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path, appendonly="yes", appendfsync="no"))
        places = [
            stack.enter_context(Served(command=f"{SERVE} --store {redis.url}")) for _ in range(2)
        ]
        one, other = (place.url for place in places)
        scope_of(HttpClient(one)).initialize()

        def listed(state):
            done = run_metadata("status", "--json", "--url", one)
            servers = {server["url"]: server for server in json.loads(done.stdout)["servers"]}
            mine = servers.pop(one)
            assert (mine["state"], mine["scopes"]) == ("serving", 1)
            assert mine["log_bytes"] > 0
            return servers == {other: {"url": other, "state": state, "scopes": 0, "log_bytes": 0}}

        eventually(lambda: listed("serving"))
        # The owner of each scope checks it, whoever is asked.
        checked = run_metadata("fsck", "--url", other)
        assert f"{SLOTS:,} slots checked, no problems" in checked.output
        done = run_metadata("status", "--url", one)
        assert f"{one}  serving, 1 scopes, logs of" in done.output
        assert f"{other}  serving, 0 scopes, logs of 0 bytes" in done.output
        assert HttpClient(other).post("/v2/drain", {"enabled": True}).status == 200
        eventually(lambda: listed("draining"))
        places[1].kill()
        eventually(lambda: listed("silent"))


def scope_of(client):
    eventually(lambda: client.get("/readyz").status == 200)
    return V2Scope(client, "0:kv", SLOTS, 4096, random.Random(1))


def is_served(scope):
    with suppress(Refused):
        return scope.client.get("/readyz").status == 200 and bool(scope.lookup(["none"]))
    return False
