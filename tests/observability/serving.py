"""Requests to a metadata server over HTTP, and its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
from contextlib import closing
from urllib.parse import urlsplit


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
