"""A client that sends invalid bodies of the size that is allowed, as fast as it can, and everybody
else."""

from __future__ import annotations

import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import msgspec
import pytest

from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.protocol import JSON, MSGPACK
from tests.metadata_server.servers import SERVE, served

pytestmark = pytest.mark.hostile

SIZE = DEFAULTS.body_bytes
SECONDS = 2.0
MAX_SECONDS = 0.1

SENDER = """
import sys
from http.client import HTTPConnection
port, path, content_type = int(sys.argv[1]), sys.argv[2], sys.argv[3]
body, sent, statuses = sys.stdin.buffer.read(), 0, set()
connection = HTTPConnection("127.0.0.1", port, timeout=120)
print("ready", flush=True)
while True:
    try:
        connection.request("POST", path, body, {"Content-Type": content_type})
        answer = connection.getresponse()
        answer.read()
    except OSError:
        connection.close()
        continue
    sent += 1
    statuses.add(answer.status)
    print(sent, *statuses, flush=True)
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
def test_health_answers_while_invalid_bodies_come(path, content_type, body, request):
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
            assert sender.stdout.readline() == b"ready\n"
            latencies, until = list[float](), time.monotonic() + SECONDS
            while time.monotonic() < until:
                begin = time.perf_counter()
                health.request("GET", "/healthz")
                answer = health.getresponse()
                answer.read()
                latencies.append(time.perf_counter() - begin)
                assert answer.status == 200
                time.sleep(0.005)
        finally:
            sender.kill()
            said = sender.stdout.read().decode().splitlines()
            sender.stdout.close()
            sender.wait(10)
            health.close()
    sent, *statuses = said[-1].split()
    latencies.sort()
    print(
        f"\n{request.node.callspec.id}: {len(body) / 2**20:.1f} MiB, {sent} bodies in {SECONDS:g} "
        f"s, answered {' '.join(statuses)}; "
        f"/healthz {len(latencies)} times, median {1e3 * latencies[len(latencies) // 2]:.1f} ms, "
        f"worst {1e3 * latencies[-1]:.1f} ms"
    )
    assert set(statuses) <= {"400", "413", "422"}
    assert latencies[-1] < MAX_SECONDS
