"""Several clients on one scope: random histories, one step at a time and all at once."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, Violation
from hicache_conformance.protocol.model import OwnershipModel

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.sglang_client import SglangScope

CLIENTS: Final = 3
THREADS: Final = 4
FOR_EVER: Final = 3600.0


class ClientCases:
    """No slot belongs to two keys, and none is lost."""

    @covers("MD-SLOT-1", "MD-SLOT-2", levels=[Level.CORE, Level.SHARED])
    def test_histories_with_room(self, context: ServerContext) -> None:
        """Random steps of three clients in a scope that has room for all.

        After each, every key is where it was confirmed.
        """
        # A sixteenth, because each step of such a history is a request, and another one compares
        # all keys.
        for _ in range(max(3, context.profile.histories // 16)):
            self._history(context, pages=512, keys=8, has_room=True)

    @covers("MD-SLOT-1", "MD-SLOT-2", levels=[Level.CORE, Level.SHARED])
    def test_histories_in_a_full_scope(self, context: ServerContext) -> None:
        """The same in a scope of fewer slots than keys, which evicts."""
        for _ in range(max(3, context.profile.histories // 16)):
            # Fewer slots than keys, so that nearly every reserve has to evict, and slots change
            # hands all the time.
            self._history(context, pages=6, keys=14, has_room=False)

    @covers("MD-SLOT-1", "MD-SLOT-2", levels=[Level.SHARED])
    def test_clients_at_once(self, context: ServerContext) -> None:
        """Threads reserve, confirm, release, delete and look up the same keys.

        What one holds is never another's.
        """
        pages, scope = 16, context.scope(16)
        keys = context.keys(24)
        shared = _SharedOwnership(scope, keys, context.server_info.lease_seconds or FOR_EVER)
        threads = [
            threading.Thread(
                target=shared.client,
                args=(
                    scope.through(context.client()),
                    random.Random(context.chance.getrandbits(64)),
                    context.profile.thread_calls,
                ),
            )
            for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if shared.errors:
            raise shared.errors[0]
        _check_no_slot_lost(context, scope, keys, pages, "clients worked at once")

    def _history(self, context: ServerContext, *, pages: int, keys: int, has_room: bool) -> None:
        scope, lease_seconds = context.scope(pages), context.server_info.lease_seconds or FOR_EVER
        clients = [scope.through(context.client()) for _ in range(CLIENTS)]
        model = OwnershipModel(scope, pages, context.keys(keys), 0.8 * lease_seconds, has_room)
        try:
            for _ in range(2 * context.profile.steps):
                self._step(context, model, context.chance.choice(clients))
            scope.try_confirm([], [*model.held, *model.expired])
            # A slot that leaked shows only when all are wanted at once.
            _check_no_slot_lost(
                context, scope, model.keys, pages, f"a history of {len(model.steps)} steps ended"
            )
        except Violation as violation:
            # The model lets a reservation count for 0.8 of its time. A step that took longer than
            # the rest of it makes the comparison worthless.
            if model.slowest > 0.1 * lease_seconds:
                raise Inconclusive(
                    f"reservations last {lease_seconds:g} s here and one step took "
                    f"{model.slowest:.1f} s"
                ) from violation
            raise

    def _step(self, context: ServerContext, model: OwnershipModel, client: SglangScope) -> None:
        chance = context.chance
        model.forget_expired()
        match context.number(0, 5):
            case 2 | 3 if model.held:
                model.confirm(chance.choice(list(model.held)), client)
            # Half of the time, so that reservations that ended earlier are confirmed and released
            # late as well.
            case 4 if model.held and chance.random() < 0.5:
                model.release(chance.choice(list(model.held)), client)
            case 4 if model.released:
                key, index = chance.choice(model.released)
                # A release names no key: whose slot it is now could not tell it from its own.
                if index not in model.held:
                    chance.choice((model.confirm_late, model.release_late))(key, index, client)
            case 5:
                model.delete(chance.sample(model.keys, context.number(1, 3)), client)
            case _:
                model.reserve(chance.choices(model.keys, k=context.number(1, 5)), client)


class _SharedOwnership:
    """State shared by the threads.

    The holder of each slot between the answer to a reserve and its confirm or release.
    """

    def __init__(self, scope: SglangScope, keys: list[str], lease_seconds: float) -> None:
        self.scope = scope
        self.keys = keys
        self.lease_seconds = lease_seconds
        self.holders: dict[int, str] = {}
        self.lock = threading.Lock()
        self.errors: list[Exception] = []

    def client(self, scope: SglangScope, chance: random.Random, calls: int) -> None:
        """One thread."""
        try:
            for _ in range(calls):
                if self.errors:
                    break
                self._step(scope, chance)
        except Exception as error:  # noqa: BLE001 - it is the case's thread that reports it
            self.errors.append(error)

    def _step(self, scope: SglangScope, chance: random.Random) -> None:
        keys = chance.sample(self.keys, chance.randint(1, 4))
        match chance.randint(0, 3):
            case 0:
                found = [index for index in scope.indices(self.keys) if index is not None]
                if len(set(found)) != len(found):
                    raise Violation(
                        "MD-SLOT-1",
                        f"one answer of get_page_indices gives two keys one slot: {sorted(found)}",
                    )
            case 1:
                scope.delete(keys)
            case _:
                self._write(scope, keys, chance)

    def _write(self, scope: SglangScope, keys: list[str], chance: random.Random) -> None:
        begin = time.monotonic()
        answer = scope.reserve(keys, rule="MD-RES-2")
        mine = [
            (key, index)
            for key, (exists, index) in zip(keys, answer, strict=True)
            if index >= 0 and not exists
        ]
        # Guards `holders`. It is not held during a request: threads that take turns would never
        # meet in the server.
        with self.lock:
            for key, index in mine:
                if index in self.holders:
                    raise Violation(
                        "MD-SLOT-1",
                        f"slot {index} is given to {key[:8]}... while {self.holders[index][:8]}... "
                        f"has it reserved",
                    )
                self.holders[index] = key
        self._check_own_hidden(scope, dict(mine), begin)
        with self.lock:
            # Before the call: as soon as the server has it, the slot may be somebody else's.
            for _, index in mine:
                del self.holders[index]
        # Mostly confirmed, so that the scope is full and slots come back by eviction, too.
        if chance.random() < 0.7:
            scope.confirm(mine)
        else:
            scope.confirm([], [index for _, index in mine])

    def _check_own_hidden(self, scope: SglangScope, mine: dict[str, int], begin: float) -> None:
        """Check that own reservations are announced for nobody, unless their time may be over."""
        found = scope.indices(self.keys)
        if time.monotonic() - begin < 0.8 * self.lease_seconds:
            for key, index in zip(self.keys, found, strict=True):
                if index in mine.values():
                    raise Violation(
                        "MD-SLOT-1",
                        f"slot {index} is announced for {key[:8]}... while another key has it "
                        f"reserved",
                    )


def _check_no_slot_lost(
    context: ServerContext, scope: SglangScope, keys: list[str], pages: int, when: str
) -> None:
    scope.delete(keys)
    context.reserve_soon(
        scope, context.keys(pages), "MD-SLOT-2", f"{when} and all was deleted and released"
    )
