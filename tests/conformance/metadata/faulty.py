"""Reference servers with one planted fault each, and the rules that find them out."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.reference import LIMITS, Desk, Handler, Reference, ReferenceServer, Refused
from tests.conformance.metadata.reference_state import LEASED, LIVE, Scope

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = {"all": p.Token.ADMIN, "look": p.Token.READ, "write": p.Token.WRITE}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A server that is wrong in one way."""

    breaks: tuple[str, ...]
    field_fault: str = ""
    """The fault of a shipped server that it repeats."""
    scope: type[Scope] = Scope
    reference: type[Reference] = Reference
    desk: type[Desk] = Desk
    handler: type[Handler] = Handler
    limits: p.Limits = LIMITS
    tokens: dict[str, p.Token] = field(default_factory=dict)
    restarts: bool = False
    """Shows only after a restart."""
    only: tuple[str, ...] = ()
    """Cases to try it with; empty for all of the rules that it breaks."""


FAULTS: dict[str, Fault] = {}


def server(
    name: str = "",
    *,
    port: int = 0,
    journal: Path | None = None,
    durability: p.Durability = p.Durability.NONE,
    tokens: bool = False,
) -> ReferenceServer:
    """The reference server, or one of the faulty ones."""
    fault = {**FAULTS, "": Fault(breaks=()), "SpeaksTheOldPartOnly": OLD}[name]
    kind = type("Made", (fault.reference,), {"kind_of_scope": fault.scope})
    desk = fault.desk(kind(limits=fault.limits, durability=durability), journal)
    return ReferenceServer(desk, port, TOKENS if tokens else fault.tokens, fault.handler)


def plant(*breaks: str, field_fault: str = "", **options: Any):
    """Register a class as a fault: of the scope, the operations, the desk or HTTP, by what it inherits."""

    def register(made: type) -> type:
        kinds = {Scope: "scope", Reference: "reference", Desk: "desk", Handler: "handler"}
        part = next(part for base, part in kinds.items() if issubclass(made, base))
        FAULTS[made.__name__] = Fault(breaks=breaks, field_fault=field_fault, **{part: made}, **options)
        return made

    return register


FAULTS["ToldLimitsAreLower"] = Fault(breaks=("MD-API-2",), limits=msgspec.structs.replace(LIMITS, key_bytes=256))


class SpeaksTheOldPartOnly(Desk):
    """No fault: a server without a native part."""

    def meaning(self, path, body):
        if path.startswith("/v2"):
            raise Refused(404, "unknown_route", f"there is no {path}")
        return super().meaning(path, body)


OLD = Fault(breaks=(), desk=SpeaksTheOldPartOnly)

# Scopes and their names.


@plant("MD-INIT-1")
class EmptiesOnInitialize(Reference):
    def compatible_initialize(self, name, slots):
        known = self.scopes.get(name)
        if known and len(known.slots) == slots:
            del self.scopes[name]
        super().compatible_initialize(name, slots)


@plant("MD-INIT-1")
class KeepsASlotForItself(Scope):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.free.pop()


@plant("MD-INIT-2", field_fault="D8")
class AcceptsAnotherSize(Reference):
    def compatible_initialize(self, name, slots):
        if name not in self.scopes:
            super().compatible_initialize(name, slots)


@plant("MD-INIT-3", field_fault="D16")
class TakesAnySize(Desk):
    def meaning(self, path, body):
        if path.endswith("/initialize") and isinstance(body, dict) and isinstance(body.get("num_pages"), int):
            body = {**body, "num_pages": abs(body["num_pages"]) or 1}
        return super().meaning(path, body)


@plant("MD-SCOPE-1")
class IgnoresRanks(Reference):
    def compatible(self, rank, operation, request, now):
        return super().compatible(0, operation, request, now)


@plant("MD-SCOPE-1")
class ClearsEveryNamespace(Reference):
    def compatible(self, rank, operation, request, now):
        if operation == "clear":
            for name, scope in self.scopes.items():
                if name.startswith(f"{rank}:"):
                    scope.settle(now)
                    scope.clear(now)
        return super().compatible(rank, operation, request, now)


@plant("MD-SCOPE-2")
class MakesScopesByItself(Reference):
    def scope(self, name, now, where="namespace"):
        if name not in self.scopes:
            self.compatible_initialize(name, 16)
        return super().scope(name, now, where)


# Keys.


@plant("MD-FIND-1", field_fault="D7")
class CompactsAnswers(Reference):
    def compatible(self, rank, operation, request, now):
        answer = super().compatible(rank, operation, request, now)
        if operation == "get_page_indices":
            answer["indices"] = [index for index in answer["indices"] if index is not None]
        return answer


@plant("MD-FIND-1")
class AnswersOnlyOnce(Reference):
    def compatible(self, rank, operation, request, now):
        if operation == "exists":
            seen = list(dict.fromkeys(request.keys))
            known = super().compatible(rank, operation, msgspec.structs.replace(request, keys=seen), now)["exists"]
            return {"exists": [*known, *[False] * (len(request.keys) - len(seen))]}
        return super().compatible(rank, operation, request, now)


class _Folds(Desk):
    def fold(self, text: str) -> str:
        raise NotImplementedError

    def folded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.fold(value)
        return [self.folded(one) for one in value] if isinstance(value, list) else value

    def meaning(self, path, body):
        if not path.startswith("/v2") and isinstance(body, dict):
            body = {name: self.folded(value) if "key" in name else value for name, value in body.items()}
        return super().meaning(path, body)


@plant("MD-FIND-2")
class FoldsCase(_Folds):
    def fold(self, text):
        return text.lower()


@plant("MD-FIND-2")
class CutsLongKeys(_Folds):
    def fold(self, text):
        return text[:255]


@plant("MD-FIND-2")
class EndsAtNul(_Folds):
    def fold(self, text):
        return text.partition("\0")[0]


@plant("MD-BIG-1")
class LooksAtAThousand(Reference):
    def compatible(self, rank, operation, request, now):
        if operation == "exists":
            rest = len(request.keys[1000:])
            answer = super().compatible(rank, operation, msgspec.structs.replace(request, keys=request.keys[:1000]), now)
            return {"exists": [*answer["exists"], *[False] * rest]}
        return super().compatible(rank, operation, request, now)


# Reservations.


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
            answer["exists"] = [flag or key in leasing for key, flag in zip(request.keys, answer["exists"], strict=True)]
        return answer


@plant("MD-RES-6", "MD-LEASE-3", field_fault="D5", limits=msgspec.structs.replace(LIMITS, lease_seconds=0.5))
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
        scope.live[key], slot.state, slot.key, slot.prefix = index, LIVE, key, ""
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
        super().confirm(scope, [pair for pair in written if pair[1] < limit], [index for index in released if index < limit], now)


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


# Eviction.


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


# Malformed requests.


@plant("MD-REQ-1", field_fault="D16")
class BreaksOnBadJson(Handler):
    def posted(self):
        try:
            return super().posted()
        except Refused as refused:
            if refused.status == 400:
                raise Refused(500, "broken", "JSONDecodeError") from refused
            raise


@plant("MD-REQ-2", field_fault="D16")
class NamesNoField(Desk):
    def execute(self, now, path, body, once):
        status, answer = super().execute(now, path, body, once)
        return status, p.Problem(code="invalid", message="bad request") if status == 422 and not path.startswith(
            "/v2"
        ) else answer


@plant("MD-REQ-3", field_fault="D16")
class ReadsTextAsKeys(Desk):
    def meaning(self, path, body):
        if isinstance(body, dict) and isinstance(body.get("keys"), str):
            body = {**body, "keys": [[key, ""] if "reserve" in path else key for key in body["keys"]]}
        return super().meaning(path, body)


@plant("MD-REQ-4")
class BreaksOnOtherRanks(Desk):
    def meaning(self, path, body):
        rank = path.split("/")[1]
        if rank != "v2":
            float(rank)
        return super().meaning(path, body)

    def execute(self, *arguments):
        try:
            return super().execute(*arguments)
        except ValueError as error:
            return 500, p.Problem(code="broken", message=str(error))


@plant("MD-REQ-5")
class BreaksOnBigNumbers(Desk):
    def meaning(self, path, body):
        if isinstance(body, dict) and 2**70 in body.values():
            raise Refused(500, "broken", "OverflowError")
        return super().meaning(path, body)


@plant("MD-HTTP-1")
class DropsTheConnection(Handler):
    def posted(self):
        try:
            return super().posted()
        except Refused as refused:
            if refused.status == 400:
                self.connection.shutdown(socket.SHUT_RDWR)
            raise


@plant("MD-BIG-2", field_fault="D16")
class SearchesItsFreeList(Scope):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.quarantine_seconds = 0.0

    def let_go(self, index, now):
        super().let_go(index, now)
        assert -1 not in self.free


# The native part.


@plant("MD-API-1")
class AnswersMsgpackWithJson(Handler):
    def say(self, status, message):
        if self.content_type() == p.MSGPACK:
            self.headers.replace_header("Content-Type", p.JSON)
        super().say(status, message)


@plant("MD-API-1")
class LosesAnEntry(Reference):
    def lookup(self, request, now):
        answer = super().lookup(request, now)
        short = [msgspec.structs.replace(found, checksums=found.checksums[:-1]) for found in answer.scopes]
        return msgspec.structs.replace(answer, scopes=short)


@plant("MD-API-2", restarts=True, only=("test_the_instance",))
class IsAlwaysTheSame(Reference):
    def __init__(self, **options):
        super().__init__(instance="one", **options)


@plant("MD-API-3")
class BeginsBeforeItLooks(Reference):
    def all_scopes(self, request, now):
        return ((part, self.scope(part.scope, now, f"scopes[{i}].scope")) for i, part in enumerate(request.scopes))


@plant("MD-API-3")
class AnswersScopesBackwards(Reference):
    def lookup(self, request, now):
        answer = super().lookup(request, now)
        return msgspec.structs.replace(answer, scopes=answer.scopes[::-1])


@plant("MD-API-4")
class KeepsTheOldPartApart(Reference):
    def compatible(self, rank, operation, request, now):
        return super().compatible(rank + 10**6, operation, request, now)


@plant("MD-GEO-1", field_fault="D8")
class IgnoresIdentities(Reference):
    def initialize(self, request, now):
        known = [
            self.scopes[part.scope].geometry.identity if part.scope in self.scopes else part.identity for part in request.scopes
        ]
        parts = [msgspec.structs.replace(part, identity=identity) for part, identity in zip(request.scopes, known, strict=True)]
        return super().initialize(p.Initialize(scopes=parts), now)


@plant("MD-LOOK-1")
class HalvesChecksums(Scope):
    def commit(self, index, length, checksum):
        super().commit(index, length, checksum % 2**32)


@plant("MD-LEASE-1")
class NeverSaysBusy(Reference):
    def reserve(self, request, now):
        answer = super().reserve(request, now)
        named = {p.Reserved.BUSY: p.Reserved.FULL}
        return msgspec.structs.replace(
            answer,
            scopes=[msgspec.structs.replace(s, states=[named.get(state, state) for state in s.states]) for s in answer.scopes],
        )


@plant("MD-LEASE-2", field_fault="D6")
class CommitsWhatIsNoMore(Reference):
    def commit_one(self, scope, lease, length, checksum, now):
        return super().commit_one(scope, lease, length, checksum, now) or lease < self.next_lease


@plant("MD-LEASE-2")
class LetsCommitsChangePages(Reference):
    def commit_one(self, scope, lease, length, checksum, now):
        again = scope.committed(lease)
        if again is not None:
            scope.slots[again].checksum = checksum
        return super().commit_one(scope, lease, length, checksum, now)


@plant("MD-LEASE-3")
class EndsLeasesEarly(Scope):
    def lease(self, key, prefix, owner, lease, until):
        return super().lease(key, prefix, owner, lease, 0.0)


@plant("MD-LEASE-4")
class RenewsNothing(Reference):
    def renew_one(self, scope, lease, until):
        return lease in scope.leases


@plant("MD-LEASE-4")
class RenewsWhatHasEnded(Reference):
    def renew_one(self, scope, lease, until):
        return super().renew_one(scope, lease, until) or lease < self.next_lease


@plant("MD-LEASE-5")
class AbortsNothing(Reference):
    def abort_one(self, scope, lease, now):
        return lease in scope.leases


@plant("MD-GEN-1")
class KeepsTheGeneration(Scope):
    def lease(self, *arguments):
        index = super().lease(*arguments)
        self.slots[index].generation = 1
        return index


@plant("MD-QUAR-1", field_fault="D2")
class ReusesAtOnce(Scope):
    def __init__(self, geometry, quarantine_seconds):
        super().__init__(geometry, 0.0)

    def let_go(self, index, now):
        super().let_go(index, now)
        self.settle(now)


@plant("MD-QUAR-1")
class ReusesWhatWasAborted(Reference):
    def abort_one(self, scope, lease, now):
        index = scope.leases.get(lease, 0)
        done = super().abort_one(scope, lease, now)
        scope.slots[index].until = now
        scope.look_again(index, now)
        return done


@plant("MD-PIN-1", field_fault="D2")
class ForgetsPins(Scope):
    def let_go(self, index, now):
        super().let_go(index, now)
        self.slots[index].pins = {}


@plant("MD-PIN-1")
class PinsForEver(Reference):
    def lookup(self, request, now):
        longer = msgspec.structs.replace(request, pin_seconds=request.pin_seconds and 30.0)
        return super().lookup(longer, now)


@plant("MD-DEL-3")
class DeletesAnyGeneration(Reference):
    def delete(self, request, now):
        parts = [msgspec.structs.replace(part, generations=[]) for part in request.scopes]
        return super().delete(p.Delete(scopes=parts), now)


@plant("MD-IDEM-1", field_fault="D16")
class DoesItAgain(Desk):
    def execute(self, now, path, body, once):
        return super().execute(now, path, body, "")


@plant("MD-IDEM-1")
class AnswersAnotherRequest(Desk):
    def remember(self, once, until, said, answer):
        self.reference.kept[once] = (until, said, answer)

    def execute(self, now, path, body, once):
        status, answer = super().execute(now, path, body, once)
        if isinstance(answer, p.Problem) and answer.code == "key_reused":
            return self.reference.kept[once][2]
        return status, answer


@plant("MD-LIM-1")
class HasNoLimits(Reference):
    def check_limits(self, request):
        pass


@plant("MD-LIM-1")
class ReadsAnyBody(Handler):
    def posted(self):
        limits = self.server.desk.reference.limits
        try:
            self.server.desk.reference.limits = msgspec.structs.replace(limits, body_bytes=2**40)
            length = int(self.headers["Content-Length"])
            if length > limits.body_bytes:
                self.rfile.read(length)
                return 200, p.LookedUp(scopes=[])
            return super().posted()
        finally:
            self.server.desk.reference.limits = limits


@plant("MD-LIM-1")
class TakesLongPages(Scope):
    def __init__(self, geometry, quarantine_seconds):
        super().__init__(geometry, quarantine_seconds)
        self.geometry = msgspec.structs.replace(geometry, slot_bytes=geometry.slot_bytes and 2**40)


@plant("MD-REQ-6")
class IgnoresUnknownFields(Desk):
    def meaning(self, path, body):
        if path == "/v2/lookup" and isinstance(body, dict):
            body = {name: value for name, value in body.items() if name in ("scopes", "pin_seconds", "touch")}
        return super().meaning(path, body)


@plant("MD-OPS-1")
class CountsWrong(Reference):
    def list_scopes(self, now):
        answer = super().list_scopes(now)
        return p.Scopes(scopes=[msgspec.structs.replace(scope, free=scope.slots - scope.live) for scope in answer.scopes])


@plant("MD-OPS-2")
class ForgetsOwners(Scope):
    def lease(self, key, prefix, owner, *rest):
        return super().lease(key, prefix, "", *rest)


@plant("MD-OPS-3")
class LooksAtNothing(Reference):
    def fsck(self, request, now):
        return p.Checked(slots=0, problems=[])


@plant("MD-OPS-3")
class MiscountsItsLeases(Scope):
    def clear(self, now):
        return super().clear(now)

    def let_go(self, index, now):
        was = self.slots[index].state
        super().let_go(index, now)
        if was is LEASED:
            self.resting += 1


@plant("MD-OPS-4")
class DrainsCommitsToo(Reference):
    def commit(self, request, now):
        if self.draining:
            raise Refused(503, "draining", "this server drains")
        return super().commit(request, now)


@plant("MD-OPS-4")
class DrainsNothing(Reference):
    def drain(self, request, now):
        answer = super().drain(request, now)
        self.draining = False
        return answer


@plant("MD-OPS-5")
class MeasuresInJson(Handler):
    def metrics(self):
        return '{"slots": 4}'


@plant("MD-AUTH-1", tokens=TOKENS)
class AsksNobody(Handler):
    def may(self):
        return True


@plant("MD-AUTH-1", tokens=TOKENS)
class LetsTheOldPartIn(Handler):
    def may(self):
        return not self.path.startswith("/v2") or super().may()


@plant("MD-AUTH-2", tokens=TOKENS)
class TakesAnyTokenForAll(Handler):
    def may(self):
        return self.bearer() in self.server.tokens or super().may()


# What a restart shows.


@plant("MD-DUR-1", field_fault="D3", restarts=True, only=("test_confirmed_keys", "test_deleted_keys"))
class WritesDownLater(Desk):
    """What it was told in the last second is lost with it."""

    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        self.late = list[tuple[float, str]]()

    def call(self, path, body, once):
        kept, self.journal = self.journal, None
        try:
            with self.lock:
                now = time.time()
                self.late.append((now, msgspec.json.encode([now, path, body, once]).decode() + "\n"))
                while kept and self.late and self.late[0][0] < now - 1:
                    kept.write(self.late.pop(0)[1])
                return self.execute(now, path, body, once)
        finally:
            self.journal = kept


@plant("MD-DUR-2", restarts=True, only=("test_killed_under_load",), limits=msgspec.structs.replace(LIMITS, lease_seconds=1))
class LosesWhatWasReserved(Desk):
    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        for scope in reference.scopes.values():
            scope.ends.clear()
            if scope.free:
                scope.free.pop()


@plant("MD-IDEM-2", restarts=True)
class ForgetsWhatItAnswered(Desk):
    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        reference.kept.clear()


@plant("MD-GEN-1", restarts=True, only=("test_generations_grow_over",))
class BeginsAgainAtOne(Desk):
    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        for scope in reference.scopes.values():
            for slot in scope.slots:
                slot.generation = 0
