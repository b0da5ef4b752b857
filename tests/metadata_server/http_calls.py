"""The application without a network: requests as a server would hand them over."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from hicache_metadata_server.auth.security import AuditLog, Security
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.protocol import JSON, StoreDurability
from hicache_metadata_server.server import restored_service
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.sqlite import open_store
from hicache_metadata_server.storage.store import MemoryStore

PATIENCE_SECONDS = 60.0
NOW = 1_800_000_000.0


class Clock:
    """A server's time, which passes when a test says so."""

    def __init__(self):
        self.now = NOW

    def __call__(self):
        return self.now


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    request_id: str = field(default="", compare=False)
    """From the headers, apart: two answers to one question differ in nothing else."""

    @property
    def json(self):
        return msgspec.json.decode(self.body)


class Caller:
    """Sends requests to an application. `peers` are other servers by address, to which a 307
    leads."""

    def __init__(self, app, peers=None):
        self.app = app
        self.peers = {} if peers is None else peers
        self.service = app.service
        self.group_commit = lambda: app.handlers.group_commit

    async def send(
        self, method, path, body=b"", *, content_type=JSON, headers=None, pieces=1, query=""
    ):
        size = -(-len(body) // pieces) or 1
        parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        messages = [
            {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
            for i, part in enumerate(parts)
        ]
        sent = []

        async def receive():
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        full = {"content-type": content_type, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in full.items()
                if value is not None
            ],
        }
        await self.app(scope, receive, send)
        found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        request_id = found.pop("x-request-id", "")
        if peer := self.peers.get(found.get("location", "").removesuffix(path)):
            return await peer.send(
                method, path, body, content_type=content_type, headers=headers, query=query
            )
        return Reply(
            sent[0]["status"],
            found,
            b"".join(message.get("body", b"") for message in sent[1:]),
            request_id,
        )

    async def post(self, path, message, **options):
        return await self.send("POST", path, msgspec.json.encode(message), **options)

    async def store(self, scope, keys, **options):
        """Reserve and commit keys by the native part; returns the answer to the commit."""
        reserved = await self.reserve(scope, keys, **options)
        leases = reserved.json["scopes"][0]["leases"]
        assert 0 not in leases, reserved.json
        return await self.commit(scope, leases, checksums=[2**64 - 1] * len(leases), **options)

    async def initialize(self, *names, slots=100, **options):
        scopes = [{"scope": name, "slots": slots} for name in names]
        return await self.post("/v2/initialize", {"scopes": scopes}, **options)

    async def reserve(self, scope, keys, **options):
        return await self.post("/v2/reserve", of_keys(scope, keys), **options)

    async def commit(self, scope, leases, checksums=(), **options):
        ones = [1] * len(leases)
        part = {"scope": scope, "leases": leases, "lengths": ones, "checksums": checksums or ones}
        return await self.post("/v2/commit", {"scopes": [part]}, **options)

    async def live(self, scope, keys):
        """Those of some keys that have a page."""
        answer = await self.post("/v2/lookup", of_keys(scope, keys))
        assert answer.status == 200, answer
        slots = answer.json["scopes"][0]["slots"]
        return [key for key, slot in zip(keys, slots, strict=True) if slot >= 0]

    async def scopes(self, **options):
        """Scopes as they are listed, by their names."""
        listed = (await self.send("GET", "/v2/scopes", **options)).json["scopes"]
        return {one["scope"]: one for one in listed}

    async def metrics(self, **options):
        return (await self.send("GET", "/metrics", **options)).body.decode()

    async def status_of(self, path):
        return (await self.send("GET", path)).status


def of_keys(scope, keys):
    """A request for keys of one scope."""
    return {"scopes": [{"scope": scope, "keys": keys}]}


async def serves(caller, scope):
    return (await caller.post("/v2/lookup", of_keys(scope, []))).status == 200


async def is_status(caller, path, status):
    return await caller.status_of(path) == status


async def eventually(condition, seconds=PATIENCE_SECONDS):
    """Ask again and again until an asynchronous condition holds, and return what it answered."""
    until = time.monotonic() + seconds
    while not (answer := await condition()):
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    return answer


def audit_to(file, **options):
    """An audit log whose lines a test reads from a file."""

    def write(event, **fields):
        with file.open("ab") as lines:
            lines.write(msgspec.json.encode({"event": event, **fields}) + b"\n")

    file.touch()
    return AuditLog(write, **options)


@asynccontextmanager
async def running(store=None, service=None, tokens=None, security=None, **options):
    store = store or MemoryStore()
    service = service or MetadataService(durability=store.durability)
    app = create_app(service, store, security=security or Security(service, tokens), **options)
    async with app.running():
        yield Caller(app)


@asynccontextmanager
async def running_on_disk(directory, durability=StoreDurability.PROCESS, **settings):
    """A server on a SQLite store in a directory, with what the store has kept."""
    store = open_store(f"sqlite:///{directory}/m.db", durability)
    service = restored_service(store, ServerSettings(**settings), time.time())
    async with running(store, service) as caller:
        yield caller


@asynccontextmanager
async def running_shared(
    url,
    limits,
    *,
    name="http://server",
    peers=None,
    replicas=0,
    lease_seconds=60.0,
    guard=None,
    **options,
):
    """One of several servers on one Redis, once it is ready, at the address `name`.

    `peers` gets it; requests are sent on to the others in it. `guard` makes what stands before its
    service. Its lease is longer than a busy machine keeps it from its heartbeats.
    """
    # redis-py is an extra.
    from hicache_metadata_server.shared.owned_scopes import owner_app

    service = MetadataService(limits, durability=StoreDurability.NONE, shares_store=True, **options)
    security = guard(service) if guard else None
    app = owner_app(
        service, url, name, replicas=replicas, lease_seconds=lease_seconds, security=security
    )
    async with app.running():
        caller = Caller(app, peers)
        if peers is not None:
            peers[name] = caller
        await eventually(lambda: is_status(caller, "/readyz", 200))
        yield caller


class SlowStore(MemoryStore):
    """Keeps changes in a list; writing waits for its gate, and fails when it is told."""

    durability = StoreDurability.MACHINE
    is_quick = False

    def __init__(self):
        self.written = []
        self.gate = threading.Event()
        self.gate.set()
        self.error = None

    def write(self, changes):
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        self.written.append(changes)
