"""A metadata server in a thread of the test's own process, so that a test sees what both ends of a
connection do."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from contextlib import closing, contextmanager
from functools import partial
from urllib.parse import urlsplit

import uvicorn

from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.http.connections import Connections, HttpConnection
from hicache_metadata_server.storage.store import MemoryStore


class _Announced(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config):
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.listens.set()


@contextmanager
def serving(store=None, **options):
    """The address of a server and its application, with HTTP as operators have it."""
    store = store or MemoryStore()
    app = create_app(MetadataService(durability=store.durability), store, **options)
    config = uvicorn.Config(
        app,
        port=0,
        log_config=None,
        access_log=False,
        lifespan="on",
        http=partial(HttpConnection, Connections(1000)),
        ws="none",
    )
    server = _Announced(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        assert server.listens.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", app
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def ask(url, method, path, message=None, **headers):
    """Status, headers with small names, and body of an answer."""
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)) as connection:
        body = None if message is None else json.dumps(message)
        named = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )


def stopped(place):
    """Stop a server as operators do, and tell what it has printed."""
    os.killpg(place.process.pid, signal.SIGTERM)
    place.process.wait(60)
    return place.log()
