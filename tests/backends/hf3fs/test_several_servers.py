"""Metadata servers under the load of engines: all are killed, one after another. One has a store of
its own, the others are on Redis.

While a scope has no owner, or its store is away, pages may be missed; nothing is lost. All other
calls go on, within their deadline. `make servers` runs it for a minute each, with more strikes: a
replica is promoted, and the network between a server and Redis is cut.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import AdminClient
from tests.backends.hf3fs.conftest import SERVE
from tests.backends.hf3fs.engines import Engines
from tests.backends.hf3fs.forwards import Forward
from tests.backends.hf3fs.strikes import Strikes
from tests.metadata_server.redis_servers import (
    RedisServer,
    redis_cluster,
    redis_replicas,
    redis_server,
    sentinels,
)
from tests.support.metadata import Served

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow(seconds=50)

SECONDS = float(os.environ.get("HICACHE_SERVERS_SECONDS", "0"))
"""How long servers are struck; each of them is once at least."""
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


@dataclass
class Store:
    url: str
    processes: list[RedisServer]
    wait: Callable[[], None]
    """Until it has come back."""
    servers: int = 2
    replicas: int = 0
    engines: int = 8


STORES = [
    "SQLite",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("one Redis", "a cluster of three")),
    *(["a Redis with a replica"] if SECONDS else []),
]
KILLS = 4
"""Of the server on SQLite in a round."""


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    if request.param == "SQLite":
        yield Store("sqlite:///{tmp}/m.db", [], lambda: None, servers=1, engines=3)
    elif request.param == "one Redis":
        with redis_server(tmp_path, **DURABLE) as one:
            yield Store(one.url, [one], lambda: None)
    elif request.param == "a cluster of three":
        with redis_cluster(tmp_path, **DURABLE) as cluster:
            yield Store(cluster.url, cluster.nodes, cluster.wait, servers=3 if SECONDS else 2)
    else:
        with (
            redis_replicas(tmp_path, **DURABLE) as nodes,
            # On two busy cores a primary may be silent for longer than the usual 400 ms.
            sentinels(tmp_path, nodes[0], replicas=1, down_milliseconds=3000) as url,
        ):
            yield Store(url, nodes, lambda: None, replicas=1)


@pytest.fixture
def cuts(store):
    """A network of its own for each server of one Redis, in the long run."""
    is_cut = SECONDS and len(store.processes) == 1
    made = [Forward(store.processes[0].port) for _ in range(store.servers if is_cut else 0)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def servers(store, cuts, monkeypatch):
    monkeypatch.setenv("HICACHE_METADATA_STORE_REPLICAS", str(store.replicas))
    urls = [f"redis://127.0.0.1:{cut.port}/0" for cut in cuts] or [store.url] * store.servers
    with ExitStack() as stack:
        yield [
            stack.enter_context(Served(command=SERVE.replace("sqlite:///{tmp}/m.db", url)))
            for url in urls
        ]


@pytest.fixture
def engines(tmp_path, servers):
    made = Engines(tmp_path, [server.url for server in servers])
    yield made
    made.close()


@pytest.fixture
def strikes(servers, store, cuts):
    """Not begun. Without more time than for one round, of a cluster the node is struck that has the
    pages."""
    made = Strikes(servers, store.wait, seconds=SECONDS)
    if not store.processes:
        made.plan = KILLS * [partial(made.kill_server, *servers)]
        return made
    short = len(store.processes) > 1 and not SECONDS
    made.plan = [partial(made.kill_server, server) for server in servers[: 1 if short else 3]]
    made.plan += [partial(made.suspend_server, server) for server in servers[: 3 if SECONDS else 1]]
    made.plan += [partial(made.suspend_server, server, 10.0) for server in servers if SECONDS]
    made.plan += [partial(made.stop_server, server) for server in servers[: 3 if SECONDS else 1]]
    made.plan += [
        partial(made.cut_network, server, cut, 10.0)
        for server, cut in zip(servers, cuts, strict=False)
    ]
    if store.replicas:
        made.plan += [lambda: made.promote_replica(store.processes)]
    elif short:
        made.plan.append(lambda: made.kill_store(max(store.processes, key=_keys)))
    else:
        made.plan += [partial(made.kill_store, process) for process in store.processes]
    return made


def _keys(node):
    with node.client() as client:
        return client.dbsize()


@pytest.mark.timeout(300 + 6 * SECONDS)
def test_servers_and_their_store_are_killed_under_load(engines, servers, store, strikes):
    """No acknowledged page is lost, no byte is wrong, no call takes longer than its deadline and a
    grace; all come back."""
    for number in range(store.engines):
        engines.engine(f"engine{number}")
    with ThreadPoolExecutor(1) as thread:
        striking = thread.submit(strikes.run)
        try:
            engines.work_beside(strikes)
        finally:
            striking.result()
    engines.read_all()
    print(*strikes.log, sep="\n")
    stored, delivered = engines.judge_all(strikes.outages)
    print(f"{stored} pages were stored, {delivered} delivered")
    assert min(stored, delivered) > 10 * store.engines
    for server in servers:
        assert AdminClient(server.url).call("/v2/fsck", p.Fsck(), p.FsckReport).problems == []
