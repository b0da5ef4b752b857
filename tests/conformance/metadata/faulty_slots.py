"""Servers with one planted fault each in how the compatible part gives slots and takes them."""

from __future__ import annotations

import msgspec

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.planting import plant
from tests.conformance.metadata.reference import LIMITS, Reference, Refused
from tests.conformance.metadata.reference_state import LEASED, LIVE, Scope


@plant("MD-RES-1")
class TakesStoredKeysForNew(Reference):
    def compatible(self, rank, operation, request, now):
        answer = super().compatible(rank, operation, request, now)
        if operation.startswith("reserve"):
            answer["indices"] = [(False, index) for _, index in answer["indices"]]
        return answer


@plant("MD-RES-2", "MD-RES-3", field_fault="D4")
class BreaksWhenFull(Scope):
    def reserve(self, keys, *rest):
        states = super().reserve(keys, *rest)
        if p.Reserved.FULL in states:
            raise Refused(500, "broken", "KeyError: 'dictionary is empty'")
        return states


@plant("MD-RES-4", "MD-LEASE-1", field_fault="D5")
class LeasesTwice(Scope):
    def reserve(self, keys, owner, next_lease, now, until):
        states = list[p.Reserved]()
        for i, pair in enumerate(keys):
            self.leasing.pop(pair[0], None)
            states += super().reserve([pair], owner, next_lease + i, now, until)
        return states

    def commit(self, index, length, checksum):
        slot = self.slots[index]
        self.leasing[slot.key] = index
        super().commit(index, length, checksum)

    def let_go(self, index, now):
        slot = self.slots[index]
        if slot.state is LEASED:
            self.leasing[slot.key] = index
        super().let_go(index, now)


@plant("MD-SLOT-2", field_fault="D5", only=("test_no_slot_is_lost_to_two_writers",))
class LosesTheSecondWritersSlot(Scope):
    def reserve(self, keys, *rest):
        states = super().reserve(keys, *rest)
        if p.Reserved.BUSY in states and self.free:
            self.free.pop()
        return states


@plant("MD-RES-5")
class ShowsWhatIsReserved(Reference):
    def compatible(self, rank, operation, request, now):
        answer = super().compatible(rank, operation, request, now)
        if operation == "exists":
            leasing = self.scope(f"{rank}:{request.namespace}", now).leasing
            answer["exists"] = [
                flag or key in leasing
                for key, flag in zip(request.keys, answer["exists"], strict=True)
            ]
        return answer


@plant(
    "MD-RES-6",
    "MD-LEASE-3",
    field_fault="D5",
    limits=msgspec.structs.replace(LIMITS, lease_seconds=0.5),
)
class LeasesForEver(Scope):
    def lease(self, key, prefix, owner, lease, until):
        return super().lease(key, prefix, owner, lease, until + 3600)


@plant("MD-CONF-1")
class ConfirmsIntoNothing(Reference):
    def confirm_one(self, scope, key, index):
        return super().confirm_one(scope, key, index) if index else scope.leasing.get(key) == 0


@plant("MD-CONF-2", field_fault="D6")
class ConfirmsAnything(Reference):
    def confirm_one(self, scope, key, index):
        if super().confirm_one(scope, key, index):
            return True
        slot = scope.slots[index]
        scope.live[key] = index
        slot.state = LIVE
        slot.key = key
        slot.prefix = ""
        return True


@plant("MD-CONF-2", field_fault="D6")
class ConfirmsOtherKeysSlots(Reference):
    def confirm_one(self, scope, key, index):
        if scope.slots[index].state is LEASED and key not in scope.live:
            slot = scope.slots[index]
            del scope.leasing[slot.key]
            slot.key = key
            scope.leasing[key] = index
        return super().confirm_one(scope, key, index)


@plant("MD-CONF-3", field_fault="D6")
class TakesAnySlot(Reference):
    def confirm(self, scope, written, released, now):
        limit = len(scope.slots)
        super().confirm(
            scope,
            [pair for pair in written if pair[1] < limit],
            [index for index in released if index < limit],
            now,
        )


@plant("MD-CONF-4", field_fault="D6")
class ReleasesLiveSlots(Reference):
    def release_one(self, scope, index, now):
        if scope.slots[index].state is LIVE:
            scope.free.appendleft(index)
        return super().release_one(scope, index, now)


@plant("MD-CONF-4")
class ReleasesTwice(Reference):
    def release_one(self, scope, index, now):
        if scope.slots[index].state is not LEASED:
            scope.free.append(index)
        return super().release_one(scope, index, now)


@plant("MD-SLOT-1", only=("test_histories",))
class GivesTheSlotOfTheLastDelete(Scope):
    def delete(self, key, now):
        gone = super().delete(key, now)
        if gone and self.leases:
            self.free.appendleft(next(iter(self.leases.values())))
        return gone


@plant("MD-DEL-1", only=("test_deleting_some",))
class LosesDeletedSlots(Scope):
    def delete(self, key, now):
        gone = super().delete(key, now)
        if gone:
            self.ends.clear()
        return gone


@plant("MD-DEL-2", "MD-CONF-2", field_fault="D6")
class ClearsNoReservations(Scope):
    def clear(self, now):
        pages = len(self.live)
        for index in list(self.live.values()):
            self.let_go(index, now)
        return pages


@plant("MD-EV-1")
class EvictsTheLatest(Scope):
    def evict(self, wanted, now):
        self.live = type(self.live)(reversed(self.live.items()))
        super().evict(wanted, now)
        self.live = type(self.live)(reversed(self.live.items()))


@plant("MD-EV-2", field_fault="D7")
class ForgetsThatItWasAsked(Reference):
    def compatible(self, rank, operation, request, now):
        scope = self.scopes.get(f"{rank}:{request.namespace}")
        order = list(scope.live) if scope else []
        answer = super().compatible(rank, operation, request, now)
        if operation == "exists":
            scope.live = type(scope.live)((key, scope.live[key]) for key in order)
        return answer


@plant("MD-EV-3", field_fault="D20")
class EvictsHeadsFirst(Scope):
    def lease(self, key, prefix, *rest):
        return super().lease(key, "", *rest)


@plant("MD-EV-4")
class EvictsPinnedPages(Scope):
    def evict(self, wanted, now):
        pins = [(slot, slot.pins) for slot in self.slots]
        for slot, _ in pins:
            slot.pins = {}
        super().evict(wanted, now)


@plant("MD-EV-4")
class TakesLeasesAway(Scope):
    def evict(self, wanted, now):
        super().evict(wanted, now)
        if wanted > len(self.live):
            for index in list(self.leases.values())[: wanted - len(self.live)]:
                self.let_go(index, now)


@plant("MD-EV-5")
class TouchesNothing(Scope):
    def touch(self, keys):
        pass


@plant("MD-QUAR-2")
class ClearsAsIfNobodyWrote(Scope):
    def clear(self, now):
        pages = len(self.live)
        for index in [*self.live.values(), *self.leases.values()]:
            self.let_go(index, now)
        return pages
