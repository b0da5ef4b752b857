"""Servers as operators start them."""

from __future__ import annotations

import sys
from contextlib import contextmanager

from hicache_metadata_server.protocol import ROUTES
from tests.support.metadata import HttpClient, Served

SERVE = f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve --port {{port}} --log-format console'
DURABLE = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 0.2 --lease-seconds 3"


@contextmanager
def served(command=DURABLE, token=""):
    """A server, and a client of it."""
    with Served(command=command) as place:
        yield place, HttpClient(place.url, token)


class RemoteService:
    """A server as the functions of `services` call it, in the place of its service."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, operation):
        path = f"/v2/{operation}"
        return lambda request, _now: self.client.call(path, request, ROUTES[path].answer)
