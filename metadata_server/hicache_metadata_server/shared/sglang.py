"""The compatible part, done in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import groups_of
from hicache_metadata_server.core.errors import RefusedError, other_size, stale
from hicache_metadata_server.core.limits import Measure, check_slots
from hicache_metadata_server.core.tenants import ANYBODY, Caller
from hicache_metadata_server.shared.catalog import MICROSECONDS, ScriptTask
from hicache_metadata_server.shared.script_results import (
    NO_IDEMPOTENCY_KEY,
    IdempotencyKey,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.shared.service import SharedService


class SharedSglangCompat:
    """What an unchanged SGLang asks for, on the same scopes."""

    def __init__(self, service: SharedService) -> None:
        self._service = service

    async def initialize(
        self,
        rank: int,
        request: p.CompatibleInitialize,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
        caller: Caller = ANYBODY,
    ) -> None:
        """Make a scope, or see that it has as many pages."""
        name = f"{rank}:{request.namespace}"
        try:
            (known,) = await self._service.catalog.find([name], ["namespace"])
        except RefusedError:
            part = p.ScopeGeometry(scope=name, slots=request.num_pages)
            try:
                await self._service.register([part], caller)
                return
            except RefusedError as refused:
                if refused.status in (403, 413):
                    raise RefusedError(
                        refused.status, refused.problem.code, refused.problem.message, "namespace"
                    ) from refused
            # Another client was quicker.
            (known,) = await self._service.catalog.find([name], ["namespace"])
        if known.geometry.slots != request.num_pages:
            raise other_size(name, known.geometry.slots, request.num_pages)

    async def exists(
        self,
        rank: int,
        request: p.CompatibleKeys,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> dict[str, Any]:
        """Which keys are live; counts as use."""
        return {"exists": [slot >= 0 for slot in await self._find(rank, request)]}

    async def get_page_indices(
        self,
        rank: int,
        request: p.CompatibleKeys,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> dict[str, Any]:
        """Slots of live keys; counts as use."""
        return {
            "indices": [slot if slot >= 0 else None for slot in await self._find(rank, request)]
        }

    async def reserve_and_allocate_page_indices(
        self,
        rank: int,
        request: p.CompatibleReserve,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> dict[str, Any]:
        """Slots for new keys, -1 where there are none."""
        keys, prefixes = [key for key, _ in request.keys], [prefix for _, prefix in request.keys]
        measure = Measure(self._service.limits)
        measure.keys(keys, "keys")
        measure.lengths(prefixes, "keys")
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        if self._service.draining:
            slots = await self._slots(name, keys, touch=False, counted=False)
            return {"indices": [(slot >= 0, slot) for slot in slots]}
        lasts, indices = (
            round(self._service.limits.lease_seconds * MICROSECONDS),
            list[tuple[bool, int]](),
        )
        for some in groups_of(request.keys):
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
        request: p.CompatibleConfirm,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> None:
        """Make reserved slots live, give others back; what cannot be done is refused after all else
        was done."""
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
        request: p.CompatibleKeys,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> None:
        """Make keys go."""
        Measure(self._service.limits).keys(request.keys, "keys")
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        for some in groups_of(request.keys):
            await self._service.catalog.run([ScriptTask("delete", name, "namespace", (some, ()))])

    async def clear(
        self,
        rank: int,
        request: p.CompatibleClear,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
    ) -> None:
        """Make everything go."""
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        await self._service.catalog.run([ScriptTask("clear", name, "namespace")])

    async def _find(self, rank: int, request: p.CompatibleKeys) -> list[int]:
        Measure(self._service.limits).keys(request.keys, "keys")
        name = f"{rank}:{request.namespace}"
        await self._service.catalog.find([name], ["namespace"])
        return await self._slots(name, request.keys, touch=True, counted=True)

    async def _slots(
        self, name: str, keys: Sequence[str], *, touch: bool, counted: bool
    ) -> list[int]:
        """From the last keys to the first, as they count as used."""
        found = list[list[int]]()
        for some in reversed(list(groups_of(keys))):
            (reply,) = await self._service.catalog.run(
                [ScriptTask("find", name, "namespace", (some, touch, counted))]
            )
            found.append(value_of(reply))
        return [slot for slots in reversed(found) for slot in slots]

    async def _confirm(
        self, name: str, pairs: Sequence[tuple[str, int]], releases: Sequence[int]
    ) -> tuple[list[bool], list[bool]]:
        confirmed, released = list[bool](), list[bool]()
        pieces: list[tuple[list[str], list[int], Sequence[int]]] = [
            ([key for key, _ in some], [slot for _, slot in some], ()) for some in groups_of(pairs)
        ]
        pieces += [([], [], some) for some in groups_of(releases)]
        for piece in pieces:
            (reply,) = await self._service.catalog.run(
                [ScriptTask("confirm", name, "namespace", piece)]
            )
            done = value_of(reply)
            confirmed += done[0]
            released += done[1]
        return confirmed, released
