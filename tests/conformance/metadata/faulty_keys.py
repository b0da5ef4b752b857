"""Servers with one planted fault each in their scopes, or in how they know keys."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.conformance.metadata.planting import plant
from tests.conformance.metadata.reference import Reference
from tests.conformance.metadata.reference_server import Handlers
from tests.conformance.metadata.reference_state import Scope


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
class TakesAnySize(Handlers):
    def meaning(self, path, body):
        if (
            path.endswith("/initialize")
            and isinstance(body, dict)
            and isinstance(body.get("num_pages"), int)
        ):
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
            known = super().compatible(
                rank, operation, msgspec.structs.replace(request, keys=seen), now
            )["exists"]
            return {"exists": [*known, *[False] * (len(request.keys) - len(seen))]}
        return super().compatible(rank, operation, request, now)


class AltersKeys(Handlers):
    def fold(self, text: str) -> str:
        raise NotImplementedError

    def folded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.fold(value)
        return [self.folded(one) for one in value] if isinstance(value, list) else value

    def meaning(self, path, body):
        if not path.startswith("/v2") and isinstance(body, dict):
            body = {
                name: self.folded(value) if "key" in name else value for name, value in body.items()
            }
        return super().meaning(path, body)


@plant("MD-FIND-2")
class FoldsCase(AltersKeys):
    def fold(self, text):
        return text.lower()


@plant("MD-FIND-2")
class CutsLongKeys(AltersKeys):
    def fold(self, text):
        return text[:255]


@plant("MD-FIND-2")
class EndsAtNul(AltersKeys):
    def fold(self, text):
        return text.partition("\0")[0]


@plant("MD-BIG-1")
class LooksAtAThousand(Reference):
    def compatible(self, rank, operation, request, now):
        if operation == "exists":
            rest = len(request.keys[1000:])
            answer = super().compatible(
                rank, operation, msgspec.structs.replace(request, keys=request.keys[:1000]), now
            )
            return {"exists": [*answer["exists"], *[False] * rest]}
        return super().compatible(rank, operation, request, now)
