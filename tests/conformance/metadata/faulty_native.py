"""Servers with one planted fault each in the native part."""

from __future__ import annotations

import msgspec

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.planting import FAULTS, TOKENS, Fault, plant
from tests.conformance.metadata.reference import LIMITS, Reference, Refused
from tests.conformance.metadata.reference_server import Handler, Handlers
from tests.conformance.metadata.reference_state import LEASED, Scope

FAULTS["ToldLimitsAreLower"] = Fault(
    breaks=("MD-API-2",), limits=msgspec.structs.replace(LIMITS, key_bytes=256)
)


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
        short = [
            msgspec.structs.replace(found, checksums=found.checksums[:-1])
            for found in answer.scopes
        ]
        return msgspec.structs.replace(answer, scopes=short)


@plant("MD-API-2", restarts=True, only=("test_the_instance",))
class IsAlwaysTheSame(Reference):
    def __init__(self, **options):
        super().__init__(instance="one", **options)


@plant("MD-API-3")
class BeginsBeforeItLooks(Reference):
    def all_scopes(self, request, now):
        return (
            (part, self.scope(part.scope, now, f"scopes[{i}].scope"))
            for i, part in enumerate(request.scopes)
        )


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
            self.scopes[part.scope].geometry.identity
            if part.scope in self.scopes
            else part.identity
            for part in request.scopes
        ]
        parts = [
            msgspec.structs.replace(part, identity=identity)
            for part, identity in zip(request.scopes, known, strict=True)
        ]
        return super().initialize(p.Initialize(scopes=parts), now)


@plant("MD-OPS-1", only=("test_the_name_of_a_model_is_listed",))
class KeepsTheFirstName(Reference):
    def describe(self, request, now):
        if not self.scope(request.scope, now, "scope").model:
            super().describe(request, now)


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
            scopes=[
                msgspec.structs.replace(s, states=[named.get(state, state) for state in s.states])
                for s in answer.scopes
            ],
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
class DoesItAgain(Handlers):
    def execute(self, now, path, body, once):
        return super().execute(now, path, body, "")


@plant("MD-IDEM-1")
class AnswersAnotherRequest(Handlers):
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
        limits = self.server.handlers.reference.limits
        try:
            self.server.handlers.reference.limits = msgspec.structs.replace(
                limits, body_bytes=2**40
            )
            length = int(self.headers["Content-Length"])
            if length > limits.body_bytes:
                self.rfile.read(length)
                return 200, p.LookedUp(scopes=[])
            return super().posted()
        finally:
            self.server.handlers.reference.limits = limits


@plant("MD-LIM-1")
class TakesLongPages(Scope):
    def __init__(self, geometry, quarantine_seconds):
        super().__init__(geometry, quarantine_seconds)
        self.geometry = msgspec.structs.replace(geometry, slot_bytes=geometry.slot_bytes and 2**40)


@plant("MD-REQ-6")
class IgnoresUnknownFields(Handlers):
    def meaning(self, path, body):
        if path == "/v2/lookup" and isinstance(body, dict):
            body = {
                name: value
                for name, value in body.items()
                if name in ("scopes", "pin_seconds", "touch")
            }
        return super().meaning(path, body)


@plant("MD-OPS-1")
class CountsWrong(Reference):
    def list_scopes(self, now):
        answer = super().list_scopes(now)
        return p.Scopes(
            scopes=[
                msgspec.structs.replace(scope, free=scope.slots - scope.live)
                for scope in answer.scopes
            ]
        )


@plant("MD-OPS-2")
class ForgetsOwners(Scope):
    def lease(self, key, prefix, owner, *rest):
        return super().lease(key, prefix, "", *rest)


@plant("MD-OPS-3")
class LooksAtNothing(Reference):
    def fsck(self, request, now):
        return p.FsckReport(slots=0, problems=[])


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


@plant("MD-OPS-6")
class DropsWhatIsQuarantined(Reference):
    def used(self, scope):
        return len(scope.live) + len(scope.leases)


@plant("MD-OPS-6")
class DropsSomeOfSeveral(Reference):
    def drop(self, request, now):
        return p.Dropped(
            slots=[
                super(DropsSomeOfSeveral, self).drop(p.Drop(scopes=[name]), now).slots[0]
                for name in request.scopes
            ]
        )


@plant("MD-OPS-6")
class KeepsThePagesOfDroppedScopes(Reference):
    def drop(self, request, now):
        dropped = {name: self.scope(name, now) for name in request.scopes}
        answer = super().drop(request, now)
        self.scopes |= dropped
        return answer


@plant("MD-OPS-6")
class CountsAnewAfterADrop(Reference):
    def reserve_in(self, scope, pairs, *rest):
        self.next_lease = getattr(scope, "next_lease", 1)
        states = super().reserve_in(scope, pairs, *rest)
        scope.next_lease = self.next_lease
        return states

    def lease_at(self, now):
        return self.next_lease


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
