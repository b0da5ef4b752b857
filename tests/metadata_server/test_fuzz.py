"""Malformed and random requests: never 5xx, no page lost, no growth of memory."""

from __future__ import annotations

import gc
import logging
import random
import statistics
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest

from hicache_metadata_server.core.limits import DEFAULTS, Quota, Quotas, TenantUsage
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import JSON, MSGPACK
from hicache_metadata_server.storage.sqlite import SqliteStore
from tests.metadata_server.every_route import SCOPE, every_route
from tests.metadata_server.http_calls import of_keys, running, running_shared
from tests.metadata_server.redis_servers import redis_server
from tests.metadata_server.test_refusals import bearer, guarded

pytestmark = pytest.mark.slow(seconds=15)

KEEP = "5:keep"
SCOPES = ["0:kv", "0:mamba", "1:kv"]
WORDS = ["", "a", "b", "k1", "k2", "k3", "\x00", "\ud7ff", "é" * 300, "x" * 2000, "0:kv", "kv"]
WORDS += ["nope", "0:kv\n", "-1:kv", "NaN"]
NUMBERS = [0, 1, -1, 2, 7, 8, 2**31, 2**40, 2**40 + 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
NUMBERS += [2**200, 0.5, -0.5, 1e308, 1e-9]
RAW = [b"", b"{", b"[" * 5000, b"\xff\xfe", b"null", b'"\\ud800"', b'{"keys":["\\ud800"]}', b"\xc1"]
RAW += [b'{"keys":["\xed\xa0\x80"]}', b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b"1e999", b"-"]
RAW += [b'{"keys":[],"keys":7}', b" " * 99]
JUNK = [*WORDS, *NUMBERS, *SCOPES, None, True, False, [], {}, [[["a"]]], [None], ["k1"] * 600]
JUNK += [{"scope": "0:kv", "keys": ["a"]}, [{"scope": "0:kv", "leases": [1]}], [["a", 1]]]


REQUESTS = [one for one in every_route(lease=1) if one.path != "/v2/drain"]
FIELDS = sorted({"extra"}.union(*(one.body or {} for one in REQUESTS)))
FIELDS += ["keys", "prefixes", "leases", "lengths", "checksums", "generations", "slot_bytes"]
PIECES = 8
"""Of a run; memory is looked at after each."""


class Fuzzer:
    """Draws requests: some right, some nearly, some nonsense."""

    def __init__(self, seed):
        self.chance = random.Random(seed)

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

    def message(self, right):
        """What is meant for the route, with something about it changed, or nonsense."""
        chance = self.chance
        if chance.random() < 0.1:
            return chance.choice(JUNK)
        body = self.varied(right or {}, chance.randrange(4))
        if chance.random() < 0.25:
            body[chance.choice(FIELDS)] = chance.choice(JUNK)
        if body and chance.random() < 0.1:
            body.pop(chance.choice(list(body)))
        return body

    def body(self, right, form):
        chance = self.chance
        if chance.random() < 0.1:
            return chance.choice(RAW)
        try:
            encoded = form.encode(self.message(right))
        except OverflowError:
            encoded = b"\xcf" + b"\xff" * 8
        if chance.random() < 0.1 and encoded:
            at = chance.randrange(len(encoded))
            encoded = encoded[:at] + bytes([chance.randrange(256)]) + encoded[at + 1 :]
        return encoded

    def request(self):
        """Method and path, and what else `Caller.send` takes."""
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
        unknown = ["text/plain", "application/json; charset=x", None]
        content_type = chance.choice([*[JSON] * 6, *[MSGPACK] * 2, *unknown])
        headers = bearer(chance.choice(TOKENS))
        if chance.random() < 0.2:
            headers["idempotency-key"] = chance.choice(("a", "b", "c" * 200))
        form = msgspec.msgpack if content_type == MSGPACK else msgspec.json
        options = {"content_type": content_type, "headers": headers}
        return (
            method,
            path,
            options
            | {
                "body": self.body(asked.body, form),
                "pieces": chance.choice((1, 1, 3)),
            },
        )


TENANTS = ("", "acme", "other")
# Most requests have a right to what they ask for.
TOKENS = (*["admin-"] * 9, *["write-acme"] * 4, "admin-acme", "read-acme", "write-other", "write-")
TOKENS += ("admin-other", "late-admin-", "wrong", "")
LIMITS = msgspec.structs.replace(
    DEFAULTS,
    quarantine_seconds=0,
    idempotency_seconds=0.05,
    lease_seconds=0.3,
    max_lease_seconds=0.5,
)


@contextmanager
def opened(kind, path):
    """A server that keeps what it has in a file, or one of several on a Redis; with tokens of two
    tenants and of none, and quotas that are reached."""

    def guard(service):
        service.quotas = Quotas({"acme": Quota(scopes=3, slots=100)}, default=Quota(bytes=10**6))
        return guarded(path, *TENANTS, service=service)["security"]

    if kind == "sqlite":
        store = SqliteStore(str(path / "m.db"))
        service = MetadataService(LIMITS, durability=store.durability, max_scopes=12)
        yield running(store, service, security=guard(service))
        return
    with redis_server(path) as redis:
        yield running_shared(redis.url, LIMITS, max_scopes=12, guard=guard)


async def send(caller, fuzzer, statuses):
    """One random request, whose answer is counted."""
    method, path, options = fuzzer.request()
    reply = await caller.send(method, path, **options)
    statuses[reply.status] += 1
    assert reply.status < 500, (method, path, options, reply)
    if reply.status >= 400:
        native = path.startswith("/v2") and options["content_type"] == MSGPACK
        problem = (msgspec.msgpack if native else msgspec.json).decode(reply.body)
        assert set(problem) == {"code", "message", "field"}, (method, path, options, reply)


@pytest.mark.parametrize(
    ("seed", "requests"),
    [(1, 2000), *(pytest.param(100 + n, 5000, marks=pytest.mark.fuzz) for n in range(4))],
)
@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.long)])
async def test_random_requests(tmp_path, store, seed, requests):
    """MD-HTTP-1 and MD-REQ-5. The fuzzer reaches everything, also sends what is right, and no
    memory is lost.

    The first pieces fill caches, and history takes a sample a second. A leak makes each piece
    greater; one step is none: the interpreter makes its table of interned strings anew now and
    then, which is 3.8 MB once torch is imported.
    """
    fuzzer, statuses, sizes = Fuzzer(seed), Counter[int](), []
    with opened(store, tmp_path) as app:
        async with app as caller:
            for token, names in (("admin-", (KEEP, "0:mamba")), ("write-acme", ("0:kv", "1:kv"))):
                await caller.initialize(*names, slots=8, headers=bearer(token))
            # A busy machine may take longer than the leases of the others.
            caller.service.limits = DEFAULTS
            stored = await caller.store(KEEP, ["one", "two"], headers=bearer("admin-"))
            assert stored.status == 200
            caller.service.limits = LIMITS
            # pytest keeps all lines of the log, which is no growth of the server.
            logging.disable()
            tracemalloc.start()
            try:
                for _ in range(PIECES):
                    for _ in range(requests // PIECES):
                        await send(caller, fuzzer, statuses)
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
            finally:
                logging.disable(logging.NOTSET)
                tracemalloc.stop()
            kept = of_keys(KEEP, ["one", "two"])
            looked_up = await caller.post("/v2/lookup", kept, headers=bearer("admin-"))
            [found] = looked_up.json["scopes"]
            assert (found["slots"], found["checksums"]) == ([0, 1], [2**64 - 1] * 2)
            checked = await caller.post("/v2/fsck", {}, headers=bearer("admin-"))
            assert checked.json["problems"] == []
            assert TenantUsage.of(caller.service.held_by("acme")).scopes <= 3
    assert set(statuses) >= {200, 400, 401, 403, 404, 409, 415, 422}
    assert statuses[200] > 0.1 * requests, statuses
    steps = [after - before for before, after in pairwise(sizes[2:])]
    assert statistics.median(steps) < 100 * requests / PIECES, sizes
