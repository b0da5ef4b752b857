"""A metadata server in this process, asked as its clients ask it, by both parts of the protocol."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.storage.sqlite import open_store
from tests.metadata_server.http_calls import Clock, running
from tests.metadata_server.services import restored

LEASE, QUARANTINE = DEFAULTS.lease_seconds, DEFAULTS.quarantine_seconds
OUT = 3 * LEASE
"""Seconds after which no lease or quarantine of a test is left."""


class Written(NamedTuple):
    """A page as it was committed."""

    key: str
    slot: int
    generation: int
    lease: int
    length: int
    checksum: int


class Peer:
    """Calls in one scope. Each answer must have its status and the documented type.

    `clock` is the server's; None where its time cannot be set.
    """

    def __init__(self, caller, clock=None, scope="0:kv"):
        self.caller, self.clock, self.scope = caller, clock, scope
        self.rank, _, self.namespace = scope.partition(":")
        self.content_type = p.JSON

    def of(self, scope):
        """Calls in another scope of the server."""
        return Peer(self.caller, self.clock, scope)

    # The part that an unchanged SGLang speaks.

    async def sglang(self, operation, status=200, **body):
        body = {"namespace": self.namespace, **body}
        reply = await self.caller.post(f"/{self.rank}/{operation}", body)
        assert reply.status == status, (operation, body, reply)
        return reply.json if reply.body else None

    async def make(self, slots):
        await self.sglang("initialize", 204, num_pages=slots)

    async def exists(self, keys):
        return (await self.sglang("exists", keys=list(keys)))["exists"]

    async def indices(self, keys):
        return (await self.sglang("get_page_indices", keys=list(keys)))["indices"]

    async def reserve(self, keys):
        """For each key whether it is there already, and its slot or -1."""
        body = {"keys": [[key, ""] for key in keys]}
        answer = await self.sglang("reserve_and_allocate_page_indices", **body)
        assert len(answer["indices"]) == len(keys)
        assert all(type(there) is bool and slot >= -1 for there, slot in answer["indices"])
        return [(there, slot) for there, slot in answer["indices"]]

    async def reserved(self, keys):
        """Slots of new keys, for which there is room."""
        answer = await self.reserve(keys)
        assert all(not there and slot >= 0 for there, slot in answer), answer
        return [slot for _, slot in answer]

    async def confirm(self, keys=(), slots=(), *, released=(), status=204):
        pairs, released = list(zip(keys, slots, strict=True)), list(released)
        body = {"written_keys_to_confirm": pairs, "pages_to_release": released}
        return await self.sglang("confirm_write", status, **body)

    async def put(self, keys):
        """Slots of new keys that are confirmed."""
        slots = await self.reserved(keys)
        await self.confirm(keys, slots)
        return slots

    # The native part.

    async def send(self, path, request=None, *, once=""):
        route = p.ROUTES[path]
        body = b"" if request is None else p.encode(request, self.content_type)
        headers = {p.IDEMPOTENCY_HEADER: once} if once else {}
        return await self.caller.send(
            route.method, path, body, content_type=self.content_type, headers=headers
        )

    async def call(self, path, request=None, **options):
        reply = await self.send(path, request, **options)
        assert reply.status in (200, 204), (path, request, reply)
        if p.ROUTES[path].answer is None:
            return None
        assert reply.headers["content-type"] == self.content_type
        return p.decode(reply.body, p.ROUTES[path].answer, self.content_type)

    async def refused(self, path, request, status, field=None):
        """The code of a refusal, which names the field where there is one."""
        reply = await self.send(path, request)
        assert reply.status == status, (path, request, reply)
        problem = p.decode(reply.body, p.Problem, self.content_type)
        assert problem.message
        assert field is None or problem.field == field, problem
        return problem.code

    async def initialize(self, slots, slot_bytes=4096, **options):
        """Make the scope; returns whether it is new."""
        part = p.ScopeGeometry(
            scope=self.scope, slots=slots, slot_bytes=slot_bytes, geometry="g", identity="identity"
        )
        request = p.Initialize(scopes=[part], **options)
        [created] = (await self.call("/v2/initialize", request)).created
        return created

    async def lookup(self, keys, **options):
        part = p.LookupScope(scope=self.scope, keys=list(keys))
        [found] = (await self.call("/v2/lookup", p.Lookup(scopes=[part], **options))).scopes
        columns = (found.slots, found.generations, found.lengths, found.checksums)
        assert {len(column) for column in columns} == {len(keys)}
        return found

    async def live(self, keys):
        """Which keys are live; does not count as use."""
        return [slot >= 0 for slot in (await self.lookup(keys, touch=False)).slots]

    async def lease(self, keys, prefixes=(), *, once=""):
        part = p.ReserveScope(scope=self.scope, keys=list(keys), prefixes=list(prefixes))
        request = p.Reserve(scopes=[part], owner="test")
        [leased] = (await self.call("/v2/reserve", request, once=once)).scopes
        columns = (leased.states, leased.slots, leased.generations, leased.leases)
        assert {len(column) for column in columns} == {len(keys)}
        return leased

    async def commit(self, leases, lengths=(), checksums=()):
        ones = [1] * len(leases)
        part = p.CommitScope(
            scope=self.scope,
            leases=list(leases),
            lengths=list(lengths) or ones,
            checksums=list(checksums) or ones,
        )
        return await self._settled("/v2/commit", p.Commit(scopes=[part]), len(leases))

    async def abort(self, leases):
        part = p.LeaseScope(scope=self.scope, leases=list(leases))
        return await self._settled("/v2/abort", p.Abort(scopes=[part]), len(leases))

    async def renew(self, leases, seconds):
        part = p.LeaseScope(scope=self.scope, leases=list(leases))
        request = p.Renew(scopes=[part], lease_seconds=seconds)
        return await self._settled("/v2/renew", request, len(leases))

    async def delete(self, keys, generations=()):
        part = p.DeleteScope(scope=self.scope, keys=list(keys), generations=list(generations))
        [flags] = (await self.call("/v2/delete", p.Delete(scopes=[part]))).scopes
        assert len(flags.done) == len(keys)
        return flags.done

    async def clear(self):
        [pages] = (await self.call("/v2/clear", p.Clear(scopes=[self.scope]))).pages
        return pages

    async def status(self):
        """As the list of scopes has it."""
        listed = (await self.call("/v2/scopes")).scopes
        [status] = [one for one in listed if one.scope == self.scope]
        return status

    async def inspect(self, keys=(), slots=()):
        request = p.Inspect(scope=self.scope, keys=list(keys), slots=list(slots))
        found = (await self.call("/v2/inspect", request)).slots
        assert len(found) == len(keys) + len(slots)
        return found

    async def store(self, keys, prefixes=()):
        """Pages with lengths and checksums of their own, some of which need all 64 bits."""
        leased = await self.lease(keys, prefixes)
        assert set(leased.states) <= {p.Reserved.LEASED}, leased
        columns = (leased.slots, leased.generations, leased.leases)
        pages = [
            Written(key, slot, generation, lease, 1 + slot, 2**64 - 1 - slot * 2**40)
            for key, slot, generation, lease in zip(keys, *columns, strict=True)
        ]
        sums = [page.checksum for page in pages]
        assert all(await self.commit(leased.leases, [page.length for page in pages], sums))
        return pages

    def wait(self, seconds=OUT):
        """Let the server's time pass."""
        self.clock.now += seconds

    async def _settled(self, path, request, count):
        [settled] = (await self.call(path, request)).scopes
        assert len(settled.states) == count
        return [state is p.Settled.DONE for state in settled.states]


def keys_of(count, name="k"):
    """Keys in the form that engines send."""
    return [f"{name}{number:063x}" for number in range(count)]


@asynccontextmanager
async def peer_on(address, **limits):
    """A server on a store, with a clock of the test's."""
    store, clock = open_store(address), Clock()
    limits = msgspec.structs.replace(DEFAULTS, **limits)
    service = restored(store, clock.now, limits)
    async with running(store, service, clock=clock) as caller:
        yield Peer(caller, clock)
