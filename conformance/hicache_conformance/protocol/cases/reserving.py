"""Reservations: assignment of slots, and a scope without free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.rules import Need

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext


class ReservingCases:
    """`reserve_and_allocate_page_indices`."""

    @covers("MD-RES-1")
    def test_new_keys_get_slots_and_old_ones_keep_theirs(self, context: ServerContext) -> None:
        """A batch of stored and new keys: the stored are said to be there, in their slots.

        The new get slots that nobody has.
        """
        with context.while_held():
            scope, stored, new = context.scope(40), context.keys(10), context.keys(10)
            where = dict(zip(stored, scope.store(stored), strict=True))
            asked = [*stored, *new]
            context.chance.shuffle(asked)
            answer = dict(zip(asked, scope.reserve(asked), strict=True))
            wrong = {key: answer[key] for key in stored if answer[key] != (True, where[key])}
            if wrong:
                raise Violation(
                    "MD-RES-1",
                    f"stored keys are answered with {list(wrong.values())}; expected true and "
                    f"their slots",
                )
            slots = [answer[key][1] for key in new]
            if (
                any(exists for exists, _ in map(answer.__getitem__, new))
                or len({*slots, *where.values()}) != 20
                or min(slots) < 0
            ):
                raise Violation(
                    "MD-RES-1",
                    f"new keys get {[answer[key] for key in new]} while slots "
                    f"{sorted(where.values())} are taken",
                )
            if max(slots) >= 40:
                raise Violation("MD-RES-1", f"a scope of 40 slots gives out slot {max(slots)}")

    @covers("MD-RES-2")
    def test_a_batch_that_does_not_fit(self, context: ServerContext) -> None:
        """A batch larger than the scope: as many keys get slots as there are, the others -1.

        The slots serve.
        """
        with context.while_held():
            pages = context.number(4, 20)
            scope, keys = context.scope(pages), context.keys(pages + context.number(1, 20))
            slots = [index for _, index in scope.reserve(keys, rule="MD-RES-2")]
            given = [index for index in slots if index >= 0]
            if sorted(given) != list(range(pages)):
                raise Violation(
                    "MD-RES-2", f"{len(keys)} keys in a scope of {pages} slots get {slots}"
                )
            scope.confirm(
                [(key, index) for key, index in zip(keys, slots, strict=True) if index >= 0],
                rule="MD-RES-2",
            )
            wanted = [index if index >= 0 else None for index in slots]
            if (found := scope.indices(keys)) != wanted:
                raise Violation(
                    "MD-RES-2",
                    f"of a batch that did not fit, {wanted} was confirmed and {found} is found",
                )

    @covers("MD-RES-2")
    def test_a_batch_that_does_not_fit_into_a_scope_in_use(self, context: ServerContext) -> None:
        """A batch larger than a scope with live and reserved slots is answered.

        The scope goes on.
        """
        with context.while_held():
            pages = context.number(6, 20)
            scope = context.scope(pages)
            live, keys = context.keys(pages // 2), context.keys(2 * pages)
            scope.store(live)
            answer = scope.reserve(keys, rule="MD-RES-2")
            given = [index for _, index in answer if index >= 0]
            left = [index for index in scope.indices(live) if index is not None]
            if len(set(given)) != len(given) or set(given) & set(left):
                raise Violation("MD-RES-2", f"slots {given} are given out while {left} are live")
            scope.confirm([], given, rule="MD-RES-2")
        context.reserve_soon(
            scope,
            context.keys(pages),
            "MD-RES-2",
            f"after a batch of {2 * pages} keys in {pages} slots was released",
        )

    @covers("MD-RES-3")
    def test_everything_reserved_and_nothing_confirmed(self, context: ServerContext) -> None:
        """With all slots reserved, further keys get -1, and released slots come back.

        Lookups work meanwhile.
        """
        with context.while_held():
            pages = context.number(4, 20)
            scope = context.scope(pages)
            keys, more = context.keys(pages), context.keys(context.number(1, 5))
            slots = [index for _, index in scope.reserve(keys)]
            for _ in range(3):
                answer = scope.reserve(more, rule="MD-RES-3")
                if answer != [(False, -1)] * len(more):
                    raise Violation(
                        "MD-RES-3", f"all {pages} slots are reserved, and new keys get {answer}"
                    )
            if any(scope.exists([*keys, *more], rule="MD-RES-3")):
                raise Violation("MD-RES-3", "nothing was confirmed, and some key is there")
            scope.confirm([], slots, rule="MD-RES-3")
        context.reserve_soon(
            scope, context.keys(pages), "MD-RES-3", f"all {pages} slots were reserved and released"
        )

    @covers("MD-RES-4")
    def test_a_key_twice_in_a_batch(self, context: ServerContext) -> None:
        """A key that stands twice in a batch gets one slot."""
        with context.while_held():
            scope, key = context.scope(8), context.keys(1)[0]
            answer = scope.reserve([key, *context.keys(2), key])
            first, second = answer[0], answer[3]
            if first[1] < 0 or second != (False, -1):
                raise Violation(
                    "MD-RES-4",
                    f"a key that stands twice in a batch gets {list(first)} and {list(second)}; "
                    f"expected a slot and -1",
                )

    @covers("MD-RES-4", levels=[Level.CORE, Level.SHARED])
    def test_two_clients_reserve_one_key(self, context: ServerContext) -> None:
        """While one client has a key reserved another gets -1.

        Once it is confirmed, the other is told that it is there.
        """
        with context.while_held():
            scope, keys = context.scope(8), context.keys(3)
            mine = [index for _, index in scope.reserve(keys)]
            other = scope.through(context.client())
            if (answer := other.reserve(keys)) != [(False, -1)] * 3:
                raise Violation(
                    "MD-RES-4",
                    f"keys that another client has reserved in slots {mine} are reserved again: "
                    f"{answer}",
                )
            scope.confirm(list(zip(keys, mine, strict=True)))
            if (answer := other.reserve(keys)) != [(True, index) for index in mine]:
                raise Violation(
                    "MD-RES-4",
                    f"keys that another client has confirmed in slots {mine} get {answer}",
                )

    @covers("MD-SLOT-2", levels=[Level.CORE, Level.SHARED])
    def test_no_slot_is_lost_to_two_writers(self, context: ServerContext) -> None:
        """Two clients write the same keys at once.

        When all is deleted and released, every slot can be reserved again.
        """
        pages = context.number(8, 20)
        with context.while_held():
            scope, keys = context.scope(pages), context.keys(pages // 2)
            other = scope.through(context.client())
            for client, answer in [(scope, scope.reserve(keys)), (other, other.reserve(keys))]:
                mine = [
                    (key, index)
                    for key, (exists, index) in zip(keys, answer, strict=True)
                    if index >= 0 and not exists
                ]
                client.try_confirm(mine)
            scope.delete(keys)
        context.reserve_soon(
            scope,
            context.keys(pages),
            "MD-SLOT-2",
            f"two clients wrote the same {len(keys)} keys, and all were deleted",
        )

    @covers("MD-RES-5")
    def test_a_reserved_key_is_not_there(self, context: ServerContext) -> None:
        """A key that is only reserved is not there for exists and get_page_indices.

        Nor is one that was released.
        """
        with context.while_held():
            scope, keys = context.scope(8), context.keys(4)
            slots = [index for _, index in scope.reserve(keys)]
            _check_unlisted(scope.exists(keys), scope.indices(keys), "reserved")
            scope.confirm([], slots)
            _check_unlisted(scope.exists(keys), scope.indices(keys), "released")

    @covers("MD-RES-6", needs=[Need.LEASES])
    def test_an_abandoned_reservation_ends(self, context: ServerContext) -> None:
        """A client reserves everything and is never heard of again.

        Its keys and slots come back by themselves.
        """
        seconds, pages = context.abandoned_seconds + context.rest_seconds, context.number(4, 12)
        scope, keys = context.scope(pages), context.keys(pages)
        scope.through(context.client()).reserve(keys)
        got = set[int]()

        def all_are_back() -> bool:
            answer = scope.reserve(context.chance.sample(keys, len(keys)), rule="MD-RES-6")
            got.update(index for _, index in answer if index >= 0)
            return len(got) == pages

        context.eventually(
            "MD-RES-6",
            lambda: f"only {len(got)} of {pages} abandoned slots came back",
            all_are_back,
            seconds,
        )


def _check_unlisted(flags: list[bool], indices: list[int | None], state: str) -> None:
    if any(flags) or any(index is not None for index in indices):
        raise Violation(
            "MD-RES-5",
            f"keys that are only {state} are found: exists {flags}, get_page_indices {indices}",
        )
