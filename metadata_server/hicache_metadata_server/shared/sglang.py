"""SGLang's protocol, executed in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import batched
from hicache_metadata_server.core.errors import RequestError, other_size, stale
from hicache_metadata_server.core.limits import Measure, check_slots
from hicache_metadata_server.core.tenants import ANYBODY, Caller
from hicache_metadata_server.shared.catalog import MICROSECONDS, ScriptTask
from hicache_metadata_server.shared.scripts import (
    NO_IDEMPOTENCY_KEY,
    IdempotencyKey,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.shared.service import SharedService


class SharedSglangCompat:
    """Operations of SGLang's own client, on the same scopes as those of the protocol."""

    def __init__(self, service: SharedService) -> None:
        self._service = service

    async def initialize(
        self,
        rank: int,
        request: p.SglangInitialize,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
        caller: Caller = ANYBODY,
    ) -> None:
        """Create a scope, or check that it has as many pages."""
        name = f"{rank}:{request.namespace}"
        try:
            (known,) = await self._service.catalog.find([name], ["namespace"])
        except RequestError:
            part = p.ScopeGeometry(scope=name, slots=request.num_pages)
            try:
                await self._service.register([part], caller)
                return
            except RequestError as refused:
                if refused.status in (403, 413):
                    raise RequestError(
                        refused.status, refused.problem.code, refused.problem.message, "namespace"
                    ) from refused
            # Another client has created it between `find` and `register`.
            (known,) = await self._service.catalog.find([name], ["namespace"])
        if known.geometry.slots != request.num_pages:
            raise other_size(name, known.geometry.slots, request.num_pages)

    async def exists(
        self,
        rank: int,
        request: p.SglangKeys,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> dict[str, Any]:
        """Return which keys are live, and record a use of them."""
        return {"exists": [slot >= 0 for slot in await self._find(rank, request)]}

    async def get_page_indices(
        self,
        rank: int,
        request: p.SglangKeys,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> dict[str, Any]:
        """Return the slots of live keys, and record a use of them."""
        return {
            "indices": [slot if slot >= 0 else None for slot in await self._find(rank, request)]
        }

    async def reserve_and_allocate_page_indices(
        self,
        rank: int,
        request: p.SglangReserve,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> dict[str, Any]:
        """Reserve slots for new keys; -1 for a key that gets none."""
        keys, prefixes = [key for key, _ in request.keys], [prefix for _, prefix in request.keys]
        measure = Measure(self._service.limits)
        measure.keys(keys, "keys")
        measure.lengths(prefixes, "keys")
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        # SGLang's client knows no refusal of a reservation: while the server drains, live keys get
        # their slots and all others none.
        if self._service.draining:
            slots = await self._slots(name, keys, touch=False, counted=False)
            return {"indices": [(slot >= 0, slot) for slot in slots]}
        lasts = round(self._service.limits.lease_seconds * MICROSECONDS)
        indices = list[tuple[bool, int]]()
        for some in batched(request.keys):
            arguments = ([key for key, _ in some], [prefix for _, prefix in some], "", lasts, False)
            (reply,) = await self._service.catalog.run(
                [ScriptTask("reserve", name, "namespace", arguments)]
            )
            states, slots, *_ = value_of(reply)
            indices += [(state == 1, slot) for state, slot in zip(states, slots, strict=True)]
        return {"indices": indices}

    async def confirm_write(
        self,
        rank: int,
        request: p.SglangConfirm,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> None:
        """Make reserved slots live and release others.

        Raises:
            RequestError: an entry is not reserved; the valid entries were executed.
        """
        pairs, releases = request.written_keys_to_confirm, request.pages_to_release
        measure = Measure(self._service.limits)
        measure.keys([key for key, _ in pairs], "written_keys_to_confirm")
        measure.entries(releases, "pages_to_release")
        name = f"{rank}:{request.namespace}"
        (known,) = await self._service.catalog.find([name], ["namespace"])
        check_slots(request, known.geometry.slots)
        confirmed, released = await self._confirm(name, pairs, releases)
        for field, done in (("written_keys_to_confirm", confirmed), ("pages_to_release", released)):
            if not all(done):
                raise stale(f"{field}[{done.index(False)}]")

    async def delete_keys(
        self,
        rank: int,
        request: p.SglangKeys,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> None:
        """Delete pages."""
        Measure(self._service.limits).keys(request.keys, "keys")
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        for some in batched(request.keys):
            await self._service.catalog.run([ScriptTask("delete", name, "namespace", (some, ()))])

    async def clear(
        self,
        rank: int,
        request: p.SglangClear,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> None:
        """Empty the scope."""
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        await self._service.catalog.run([ScriptTask("clear", name, "namespace")])

    async def _find(self, rank: int, request: p.SglangKeys) -> list[int]:
        Measure(self._service.limits).keys(request.keys, "keys")
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        return await self._slots(name, request.keys, touch=True, counted=True)

    async def _slots(
        self, name: str, keys: Sequence[str], *, touch: bool, counted: bool
    ) -> list[int]:
        """Find slots from the last keys to the first."""
        # The head of a chain is used last, so that eviction takes tails before heads.
        found = list[list[int]]()
        for some in reversed(list(batched(keys))):
            (reply,) = await self._service.catalog.run(
                [ScriptTask("find", name, "namespace", (some, touch, counted))]
            )
            found.append(value_of(reply))
        return [slot for slots in reversed(found) for slot in slots]

    async def _confirm(
        self, name: str, pairs: Sequence[tuple[str, int]], releases: Sequence[int]
    ) -> tuple[list[bool], list[bool]]:
        confirmed, released = list[bool](), list[bool]()
        chunks: list[tuple[list[str], list[int], Sequence[int]]] = [
            ([key for key, _ in some], [slot for _, slot in some], ()) for some in batched(pairs)
        ]
        chunks += [([], [], some) for some in batched(releases)]
        for chunk in chunks:
            (reply,) = await self._service.catalog.run(
                [ScriptTask("confirm", name, "namespace", chunk)]
            )
            done = value_of(reply)
            confirmed += done[0]
            released += done[1]
        return confirmed, released
