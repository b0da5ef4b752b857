"""Malformed and random requests: never 5xx, no page lost, no growth of memory."""

from __future__ import annotations

import gc
import logging
import random
import statistics
import tracemalloc
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import msgspec
import pytest

from hicache_metadata_server.core.limits import DEFAULTS, Quota, Quotas, TenantUsage
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import JSON, MSGPACK
from hicache_metadata_server.storage.sqlite import SqliteStore
from tests.metadata_server import test_refusals
from tests.metadata_server.every_route import SCOPE, every_route
from tests.metadata_server.http_calls import running, running_shared
from tests.metadata_server.redis_servers import redis_server

pytestmark = pytest.mark.slow(seconds=25)

KEEP = "5:keep"
SCOPES = ["0:kv", "0:mamba", "1:kv"]
WORDS = ["", "a", "b", "k1", "k2", "k3", "\x00", "\ud7ff", "é" * 300, "x" * 2000, "0:kv", "kv"]
WORDS += ["nope", "0:kv\n", "-1:kv", "NaN"]
NUMBERS = [0, 1, -1, 2, 7, 8, 2**31, 2**40, 2**40 + 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
NUMBERS += [2**200, 0.5, -0.5, 1e308, 1e-9]
RAW = [b"", b"{", b"[" * 5000, b"\xff\xfe", b"null", b'"\\ud800"', b'{"keys":["\\ud800"]}', b"\xc1"]
RAW += [b'{"keys":["\xed\xa0\x80"]}', b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b"1e999", b"-"]
RAW += [b'{"keys":[],"keys":7}', b" " * 99]


REQUESTS = [one for one in every_route(lease=1) if one.path != "/v2/drain"]
FIELDS = sorted({"extra"}.union(*(one.body or {} for one in REQUESTS)))
FIELDS += ["keys", "prefixes", "leases", "lengths", "checksums", "generations", "slot_bytes"]
PIECES = 8
"""Of a run; memory is looked at after each."""


class Fuzzer:
    """Draws requests: some right, some nearly, some nonsense."""

    def __init__(self, seed):
        self.chance = random.Random(seed)

    def value(self, depth=0):
        chance = self.chance
        match chance.randrange(8 if depth < 4 else 4):
            case 0:
                return chance.choice(WORDS)
            case 1:
                return chance.choice(NUMBERS)
            case 2:
                return chance.choice((None, True, False))
            case 3:
                return chance.choice(SCOPES)
            case 4 | 5:
                return [self.value(depth + 1) for _ in range(chance.randrange(4))]
            case 6:
                names = chance.choices(FIELDS, k=chance.randrange(4))
                return {name: self.value(depth + 1) for name in names}
            case _:
                return [chance.choice(WORDS[1:6])] * chance.randrange(1, 600)

    def varied(self, value, count):
        """A field of a right message with other words and numbers, and columns of that length."""
        chance = self.chance
        match value:
            case dict():
                return {name: self.varied(one, count) for name, one in value.items()}
            case [[*pair]]:
                return [[self.varied(one, count) for one in pair] for _ in range(count)]
            case [dict() as part]:
                return [self.varied(part, count) for _ in range(chance.randrange(3))]
            case [one]:
                return [self.varied(one, count) for _ in range(count)]
            case str():
                scoped = value == SCOPE or value in ("kv", "mamba")
                names = SCOPES if value == SCOPE else ("kv", "kv", "kv", "mamba", "a b")
                return chance.choice(names if scoped else WORDS[1:6])
            case 64:
                return chance.choice((8, 8, 9, 2**40))
            case int() | float() if not isinstance(value, bool):
                return chance.randrange(1, 12)
            case _:
                return value

    def body(self, right):
        """A message that is meant for the route, with something about it changed."""
        chance = self.chance
        body = self.varied(right or {}, chance.randrange(4))
        if chance.random() < 0.25:
            body[chance.choice(FIELDS)] = self.value()
        if body and chance.random() < 0.1:
            body.pop(chance.choice(list(body)))
        return body

    def request(self):
        chance = self.chance
        asked = chance.choice(REQUESTS)
        path = asked.path
        if chance.random() < 0.1:
            path = chance.choice(("/", "/nope", "//", "/v2/", "/metrics"))
        elif not path.startswith("/v2"):
            rank = chance.choice(("0", "0", "0", "0", "1", "x", "9" * 30, "٣"))
            path = f"/{rank}{path.removeprefix('/0')}"
        others = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS")
        method = "POST" if chance.random() < 0.9 else chance.choice(others)
        unknown = ["text/plain", "application/json; charset=x", ""]
        content_type = chance.choice([*[JSON] * 5, *[MSGPACK] * 2, *unknown])
        headers = {}
        if chance.random() < 0.2:
            headers["idempotency-key"] = chance.choice(("a", "b", "c" * 200))
        if chance.random() < 0.1:
            return method, path, chance.choice(RAW), content_type, headers
        message = self.value() if chance.random() < 0.2 else self.body(asked.body)
        try:
            form = msgspec.msgpack if content_type == MSGPACK else msgspec.json
            encoded = form.encode(message)
        except OverflowError:
            encoded = b"\xcf" + b"\xff" * 8
        if chance.random() < 0.1 and encoded:
            at = chance.randrange(len(encoded))
            encoded = encoded[:at] + bytes([chance.randrange(256)]) + encoded[at + 1 :]
        return method, path, encoded, content_type, headers


def guarded(path, service):
    """Tokens of two tenants and of none, and quotas that are reached."""
    quota = Quota(scopes=3, slots=100)
    service.quotas = Quotas({"acme": quota}, default=Quota(bytes=10**6))
    return test_refusals.guarded(path, *TENANTS, service=service)["security"]


TOKENS = (
    "write-acme admin-acme read-acme write-other admin-other write- admin- admin- late-admin- wrong"
)
TOKENS = [*TOKENS.split(), ""]
OPERATOR = {"authorization": "Bearer admin-"}
TENANTS = ("", "acme", "other")
LIMITS = msgspec.structs.replace(
    DEFAULTS,
    quarantine_seconds=0,
    idempotency_seconds=0.05,
    lease_seconds=0.3,
    max_lease_seconds=0.5,
)


@contextmanager
def opened(kind, path, *, tokens):
    """A server that keeps what it has in a file, or one of several on a Redis."""
    if kind == "sqlite":
        store = SqliteStore(str(path / "m.db"))
        service = MetadataService(LIMITS, durability=store.durability, max_scopes=12)
        yield running(store, service, security=guarded(path, service) if tokens else None)
        return
    with redis_server(path) as redis:
        guard = partial(guarded, path) if tokens else None
        # Longer than a busy machine keeps it from its heartbeats.
        yield running_shared(redis.url, LIMITS, max_scopes=12, guard=guard, lease_seconds=60.0)


async def fuzz(app, seed, requests, *, tokens):
    fuzzer, statuses, sizes = Fuzzer(seed), dict[int, int](), []
    async with app as caller:
        for headers, names in (
            (OPERATOR, (KEEP, "0:mamba")),
            ({"authorization": "Bearer write-acme"}, ("0:kv", "1:kv")),
        ):
            made = {"scopes": [{"scope": name, "slots": 8} for name in names]}
            await caller.post("/v2/initialize", made, headers=headers)
        assert (await caller.store(KEEP, ["one", "two"], headers=OPERATOR)).status == 200
        # pytest keeps all lines of the log, which is no growth of the server.
        logging.disable()
        tracemalloc.start()
        try:
            for number in range(requests):
                method, path, body, content_type, headers = fuzzer.request()
                if tokens:
                    headers = {**headers, "authorization": f"Bearer {fuzzer.chance.choice(TOKENS)}"}
                reply = await caller.send(
                    method,
                    path,
                    body,
                    content_type=content_type or None,
                    headers=headers,
                    pieces=fuzzer.chance.choice((1, 1, 3)),
                )
                statuses[reply.status] = statuses.get(reply.status, 0) + 1
                assert reply.status < 500, (method, path, body, reply)
                if reply.status >= 400:
                    native = path.startswith("/v2") and content_type == MSGPACK
                    problem = (msgspec.msgpack if native else msgspec.json).decode(reply.body)
                    assert set(problem) == {"code", "message", "field"}, (method, path, body, reply)
                if number % (requests // PIECES) == requests // PIECES - 1:
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            logging.disable(logging.NOTSET)
            tracemalloc.stop()
        kept = {"scopes": [{"scope": KEEP, "keys": ["one", "two"]}]}
        looked_up = await caller.post("/v2/lookup", kept, headers=OPERATOR)
        found = looked_up.json["scopes"][0]
        assert (found["slots"], found["checksums"]) == ([0, 1], [2**64 - 1] * 2)
        assert (await caller.post("/v2/fsck", {}, headers=OPERATOR)).json["problems"] == []
        assert TenantUsage.of(caller.service.held_by("acme")).scopes <= 3 or not tokens
    return statuses, sizes


@pytest.mark.parametrize(
    ("seed", "requests"),
    [(1, 2000), *(pytest.param(100 + n, 5000, marks=pytest.mark.fuzz) for n in range(4))],
)
@pytest.mark.parametrize("tokens", [False, True], ids=["anybody", "tenants"])
@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.long)])
async def test_random_requests(tmp_path, store, seed, requests, tokens):
    """MD-HTTP-1 and MD-REQ-5. The fuzzer reaches everything, also sends what is right, and no
    memory is lost.

    The first pieces fill caches, and history takes a sample a second. A leak makes each piece
    greater; one step is none: the interpreter makes its table of interned strings anew now and
    then, which is 3.8 MB once torch is imported.
    """
    with opened(store, tmp_path, tokens=tokens) as app:
        statuses, sizes = await fuzz(app, seed, requests, tokens=tokens)
    reached = {401, 403, 404, 409, 422} if tokens else {400, 404, 409, 415, 422}
    assert set(statuses) >= {200, *reached}
    assert statuses[200] > (0.04 if tokens else 0.1) * requests, statuses
    steps = [after - before for before, after in pairwise(sizes[2:])]
    assert statistics.median(steps) < 100 * requests / PIECES, sizes
