"""SGLang's own client of the metadata server, on two servers that share a Redis."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
import requests
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsGlobalMetadataClient

from tests.interop.stores import SERVE, live
from tests.support.metadata import Served
from tests.support.waiting import eventually

pytestmark = [pytest.mark.interop, pytest.mark.slow(seconds=15)]

RANKS, PAGES = range(4), 100
# redis-py is an extra of the server, which an environment of SGLang need not have.
PYTHON = (
    sys.executable
    if importlib.util.find_spec("redis")
    else str(Path(__file__).parents[2] / ".venv/bin/python")
)


REDIS = (
    "redis-server --port {port} --bind 127.0.0.1 --save '' --appendonly yes --appendfsync always "
    "--dir {tmp}"
)


@pytest.fixture
def servers():
    """Two metadata servers on one Redis."""
    with Served(command=REDIS) as redis:
        address = f"redis://127.0.0.1:{redis.port}/0"
        command = f"{SERVE} {address}".replace(sys.executable, PYTHON)
        with Served(command=command) as one, Served(command=command) as other:
            yield one, other


def keys_of(rank):
    return [f"{rank}-{number}" for number in range(PAGES)]


def test_each_server_sends_it_to_the_owner_and_a_killed_one_is_replaced(servers):
    one, other = servers
    clients = [Hf3fsGlobalMetadataClient(server.url) for server in servers]
    pages = {}
    for rank in RANKS:
        client, keys = clients[rank % 2], keys_of(rank)
        client.initialize(rank, 200, "kv")
        reserved = client.reserve_and_allocate_page_indices(rank, [(key, "") for key in keys], "kv")
        pages[rank] = [slot for _, slot in reserved]
        client.confirm_write(rank, list(zip(keys, pages[rank], strict=True)), [], "kv")
    assert set(live(other.url)) == {f"{rank}:kv" for rank in RANKS}

    def found(client):
        return {rank: client.get_page_indices(rank, keys_of(rank), "kv") for rank in RANKS}

    assert found(clients[0]) == found(clients[1]) == pages
    one.kill()

    def other_has_them():
        with contextlib.suppress(requests.RequestException):
            return found(clients[1])

    assert eventually(other_has_them, "the other server does not take the scopes") == pages
    client = clients[1]
    assert client.exists(0, [*keys_of(0), "never"], "kv") == [True] * PAGES + [False]
    client.delete_keys(0, keys_of(0)[:10], "kv")
    assert client.exists(0, keys_of(0), "kv") == [False] * 10 + [True] * (PAGES - 10)
