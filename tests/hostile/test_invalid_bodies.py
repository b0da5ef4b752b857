"""A client that sends invalid bodies of the size that is allowed, as fast as it can, and everybody
else."""

from __future__ import annotations

import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import msgspec
import pytest

from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.protocol import JSON, MSGPACK
from tests.metadata_server.servers import SERVE, served

pytestmark = pytest.mark.hostile

SIZE = DEFAULTS.body_bytes
BODIES = 20

SENDER = """
import sys
from http.client import HTTPConnection
port, path, content_type = int(sys.argv[1]), sys.argv[2], sys.argv[3]
body = sys.stdin.buffer.read()
connection = HTTPConnection("127.0.0.1", port, timeout=120)
while True:
    try:
        connection.request("POST", path, body, {"Content-Type": content_type})
        answer = connection.getresponse()
        answer.read()
    except OSError:
        connection.close()
        continue
    print(answer.status, flush=True)
"""


def lookup(keys):
    return {"scopes": [{"scope": "0:kv", "keys": keys}]}


def encoded(message, content_type):
    return msgspec.json.encode(message) if content_type == JSON else msgspec.msgpack.encode(message)


def bodies():
    """Name, path, content type and body."""
    for name, content_type in (("JSON", JSON), ("msgpack", MSGPACK)):
        short = ["k"] * (SIZE // (4 if content_type == JSON else 2) - 100)
        long = ["k" * (SIZE // DEFAULTS.keys - 8)] * (DEFAULTS.keys - 1)
        for kind, message in (
            ("last of many keys", lookup([*short, None])),
            ("last of long keys", lookup([*long, None])),
            ("middle of long keys", lookup([*long[: len(long) // 2], 7, *long[len(long) // 2 :]])),
            ("too many keys", lookup(short)),
            ("many scopes", {"scopes": [{"scope": "0:kv", "keys": []}] * (SIZE // 27)}),
            (
                "as many as are decoded, the last wrong",
                lookup([*short[: DEFAULTS.keys * 19 // 10], None]),
            ),
            ("numbers for keys", lookup([1] * (SIZE // 3))),
            ("empty lists for keys", {"keys": [[]] * (SIZE // 4)}),
        ):
            yield (
                f"{name}: {kind}",
                "/v2/lookup",
                content_type,
                encoded(message, content_type)[:SIZE],
            )
        whole = encoded(lookup(long), content_type)
        yield f"{name}: truncated", "/v2/lookup", content_type, whole[: len(whole) - 3]
        nested = b"[" * SIZE if content_type == JSON else b"\x81\xa6scopes" + b"\x91" * (SIZE - 8)
        yield f"{name}: nested", "/v2/lookup", content_type, nested
    digits = b"1" * (SIZE - 100)
    yield "JSON: huge number", "/v2/lookup", JSON, b'{"scopes":[],"pin_seconds":-0.' + digits + b"}"
    yield "JSON: huge integer", "/v2/unpin", JSON, b'{"pins":[' + digits + b"]}"
    yield (
        "JSON: a text that does not end",
        "/v2/lookup",
        JSON,
        b'{"scopes":[' + b'\\",' * (SIZE // 3 - 10),
    )
    yield "JSON: quotes", "/v2/lookup", JSON, b'"' * SIZE
    pairs = [["k", ""]] * (SIZE // 9 - 20)
    yield (
        "JSON: pairs, the last wrong",
        "/0/reserve_and_allocate_page_indices",
        JSON,
        encoded({"keys": [*pairs, None]}, JSON),
    )


@pytest.mark.parametrize(
    ("path", "content_type", "body"), [pytest.param(*rest, id=name) for name, *rest in bodies()]
)
def test_health_answers_while_invalid_bodies_come(path, content_type, body):
    """Each long body has a turn of the event loop: tests/metadata_server/test_app.py."""
    assert len(body) <= SIZE
    with served(f"{SERVE} --store memory:") as (place, _):
        port = urlsplit(place.url).port
        health = HTTPConnection("127.0.0.1", port, timeout=120)
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(port), path, content_type],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            sender.stdin.write(body)
            sender.stdin.close()
            for _ in range(BODIES):
                assert int(sender.stdout.readline()) in (400, 413, 422)
                health.request("GET", "/healthz")
                answer = health.getresponse()
                answer.read()
                assert answer.status == 200
        finally:
            sender.kill()
            sender.stdout.close()
            sender.wait(10)
            health.close()
