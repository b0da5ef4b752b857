"""SGLang's protocol, on the scopes of the service."""

from __future__ import annotations

from array import array
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import ANYBODY, Caller, Measure, check_slots
from hicache_metadata_server.core.slot_table import LEASED

if TYPE_CHECKING:
    from hicache_metadata_server.core.scope import Scope
    from hicache_metadata_server.core.service import MetadataService


class SglangService:
    """Operations of SGLang's protocol. A reservation is a lease, named by its key and slot."""

    def __init__(self, service: MetadataService) -> None:
        self._service = service

    def initialize(
        self, rank: int, request: p.SglangInitialize, now: float, caller: Caller = ANYBODY
    ) -> None:
        """Create a scope, or check its number of pages."""
        name = f"{rank}:{request.namespace}"
        known = self._service.scopes.get(name)
        if known is None:
            geometry = p.ScopeGeometry(scope=name, slots=request.num_pages)
            self._service.check_room([geometry], caller, "namespace")
            self._service.add_scope(geometry, caller.tenant)
        elif known.geometry.slots != request.num_pages:
            message = f"scope {name!r} has {known.geometry.slots} pages, not {request.num_pages}"
            raise RequestError(409, "mismatch", message, "num_pages")

    def exists(self, rank: int, request: p.SglangKeys, now: float) -> dict[str, Any]:
        """Tell for each key if it is live, and mark live ones as used."""
        slots = self._with_keys(rank, request).lookup(request.keys)
        if p.NO_SLOT in slots:
            return {"exists": [slot >= 0 for slot in slots]}
        return {"exists": [True] * len(slots)}

    def get_page_indices(self, rank: int, request: p.SglangKeys, now: float) -> dict[str, Any]:
        """Look up the slots of live keys, and mark them as used."""
        slots = self._with_keys(rank, request).lookup(request.keys)
        if p.NO_SLOT in slots:
            return {"indices": [slot if slot >= 0 else None for slot in slots]}
        return {"indices": list(slots)}

    def reserve_and_allocate_page_indices(
        self, rank: int, request: p.SglangReserve, now: float
    ) -> dict[str, Any]:
        """Lease slots for new keys; -1 for keys without a slot."""
        # One transposition: a loop over the pairs for each column takes several times as long.
        keys, prefixes = (
            (list(column) for column in zip(*request.keys, strict=True))
            if request.keys
            else ([], [])
        )
        measure = Measure(self._service.limits)
        measure.keys(keys, "keys")
        if any(prefixes):
            measure.lengths(prefixes, "keys")
        scope = self._service.find(f"{rank}:{request.namespace}")
        # This protocol has no error for a draining server: new keys get no slot, as if it were full.
        if self._service.draining:
            return {"indices": [(slot >= 0, slot) for slot in scope.lru.slots(keys)]}
        states, slots, leases = self._service.lease(scope, keys, prefixes, now)
        if all(leases):
            return {"indices": list(zip(repeat(False), slots))}
        exists = p.Reserved.EXISTS
        return {
            "indices": [(state is exists, slot) for state, slot in zip(states, slots, strict=True)]
        }

    def confirm_write(self, rank: int, request: p.SglangConfirm, now: float) -> None:
        """Make reserved slots live, and give others back.

        Raises:
            RequestError: 409 `stale` if some are not reserved; all others were done.
        """
        measure = Measure(self._service.limits)
        measure.keys(
            list(map(itemgetter(0), request.written_keys_to_confirm)), "written_keys_to_confirm"
        )
        measure.entries(request.pages_to_release, "pages_to_release")
        scope = self._service.find(f"{rank}:{request.namespace}")
        check_slots(request, scope.geometry.slots)
        # A reservation that has ended must be seen as ended before its confirm.
        scope.settle(now)
        refused = self._confirm(scope, request.written_keys_to_confirm)
        for i, done in enumerate(scope.release(request.pages_to_release, now)):
            if not done:
                refused = refused or f"pages_to_release[{i}]"
        if refused:
            message = "that slot is not reserved for that key; all else was done"
            raise RequestError(409, "stale", message, refused)

    def delete_keys(self, rank: int, request: p.SglangKeys, now: float) -> None:
        """Delete keys."""
        Measure(self._service.limits).keys(request.keys, "keys")
        self._service.find(f"{rank}:{request.namespace}").delete(request.keys, (), now)

    def clear(self, rank: int, request: p.SglangClear, now: float) -> None:
        """Delete all pages of a scope."""
        name = f"{rank}:{request.namespace}"
        self._service.find(name)
        self._service.clear(p.Clear(scopes=[name]), now)

    def _with_keys(self, rank: int, request: p.SglangKeys) -> Scope:
        Measure(self._service.limits).keys(request.keys, "keys")
        return self._service.find(f"{rank}:{request.namespace}", changes=False)

    def _confirm(self, scope: Scope, pairs: list[tuple[str, int]]) -> str:
        table, refused = scope.table, ""
        keys, slots = (list(column) for column in zip(*pairs, strict=True)) if pairs else ([], [])
        if not scope.leases.are_held(slots, keys):
            mine = dict[int, None]()
            for i, (key, slot) in enumerate(pairs):
                if table.by_key.get(key, -1) != slot:
                    refused = refused or f"written_keys_to_confirm[{i}]"
                elif table.states[slot] == LEASED:
                    mine[slot] = None
            slots = list(mine)
        # SGLang's clients send neither lengths nor checksums.
        zeros = array("Q", bytes(8 * len(slots)))
        scope.make_live(slots, zeros, zeros)
        return refused
