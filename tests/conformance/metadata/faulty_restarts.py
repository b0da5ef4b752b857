"""Servers with one planted fault each that shows after a restart."""

from __future__ import annotations

import time

import msgspec

from tests.conformance.metadata.planting import plant
from tests.conformance.metadata.reference import LIMITS
from tests.conformance.metadata.reference_server import Handlers


@plant(
    "MD-DUR-1", field_fault="D3", restarts=True, only=("test_confirmed_keys", "test_deleted_keys")
)
class WritesDownLater(Handlers):
    """What it was told in the last second is lost with it."""

    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        self.late = list[tuple[float, str]]()

    def call(self, path, body, once):
        kept = self.journal
        self.journal = None
        try:
            with self.lock:
                now = time.time()
                self.late.append(
                    (now, msgspec.json.encode([now, path, body, once]).decode() + "\n")
                )
                while kept and self.late and self.late[0][0] < now - 1:
                    kept.write(self.late.pop(0)[1])
                return self.execute(now, path, body, once)
        finally:
            self.journal = kept


@plant(
    "MD-DUR-2",
    restarts=True,
    only=("test_killed_under_load",),
    limits=msgspec.structs.replace(LIMITS, lease_seconds=1),
)
class LosesWhatWasReserved(Handlers):
    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        for scope in reference.scopes.values():
            scope.ends.clear()
            if scope.free:
                scope.free.pop()


@plant("MD-IDEM-2", restarts=True)
class ForgetsWhatItAnswered(Handlers):
    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        reference.kept.clear()


@plant("MD-GEN-1", restarts=True, only=("test_generations_grow_over",))
class BeginsAgainAtOne(Handlers):
    def __init__(self, reference, journal=None):
        super().__init__(reference, journal)
        for scope in reference.scopes.values():
            for slot in scope.slots:
                slot.generation = 0


@plant("MD-LEASE-6", restarts=True)
class ForgetsItsNumbers(Handlers):
    """And all else; such a server begins at 1 again."""

    def __init__(self, reference, journal=None):
        super().__init__(reference)
        reference.lease_at = lambda now: reference.next_lease


@plant("MD-QUAR-3", restarts=True)
class OpensNewScopesAtOnce(Handlers):
    """Whoever may still write into them."""

    def execute(self, now, path, body, once):
        if path == "/v2/initialize":
            body = {name: value for name, value in body.items() if name != "earlier_lease_seconds"}
        return super().execute(now, path, body, once)
