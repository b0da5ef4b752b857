"""Eviction by prefix chains and recency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import LookupScope, Marked, Touch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.v2_client import V2Scope


class ChainCases:
    """Order of eviction."""

    @covers("MD-EV-3", needs=[Need.NATIVE])
    def test_tails_go_before_heads(self, context: ServerContext) -> None:
        """Chains lose pages from their ends only, in whatever order they were written and read."""
        lengths = [context.number(3, 6) for _ in range(3)]
        scope, chains = context.v2_scope(sum(lengths)), [context.keys(length) for length in lengths]
        pairs = [pair for chain in chains for pair in zip(chain, ["", *chain[:-1]], strict=True)]
        # Out of order, so that neither the order of the batch nor the age of a page tells what its
        # prefix is.
        context.chance.shuffle(pairs)
        scope.store([key for key, _ in pairs], [prefix for _, prefix in pairs])
        # Tails are used last, so that plain recency would take the heads of all chains first.
        for depth in range(max(lengths)):
            scope.lookup([chain[depth] for chain in chains if depth < len(chain)])
        context.lease_soon(
            scope,
            context.keys(sum(lengths) // 2),
            "MD-EV-3",
            f"a scope is full with chains of {lengths}",
        )
        for chain in chains:
            # A prefix of the chain and nothing behind it; how long it is, is the server's choice.
            live = scope.live(chain)
            if live != sorted(live, reverse=True):
                raise Violation(
                    "MD-EV-3",
                    f"of a chain of {len(chain)} pages {_drawn(live)} is left (head first, x is "
                    f"live)",
                )

    @covers("MD-EV-5", needs=[Need.NATIVE])
    def test_touching_is_use(self, context: ServerContext) -> None:
        """Pages that were touched stay while others go; touch tells which keys are live."""

        def touch(scope: V2Scope, keys: Sequence[str]) -> None:
            missing = context.keys(1)
            request = Touch(scopes=[LookupScope(scope=scope.name, keys=[*keys, *missing])])
            done = context.native.call("/v2/touch", request, Marked).scopes[0].done
            if done != [True] * len(keys) + [False]:
                raise Violation(
                    "MD-EV-5", f"touch of {len(keys)} live keys and a missing one answers {done}"
                )

        self._keeps_what_is_in_use(context, touch)

    @covers("MD-EV-5", needs=[Need.NATIVE])
    def test_looking_up_is_use(self, context: ServerContext) -> None:
        """Pages that were looked up stay while others go.

        Those looked up without touch do not count as used.
        """

        def look_up(scope: V2Scope, keys: Sequence[str]) -> None:
            scope.lookup(keys)

        self._keeps_what_is_in_use(context, look_up)

    def _keeps_what_is_in_use(
        self, context: ServerContext, use: Callable[[V2Scope, Sequence[str]], None]
    ) -> None:
        slots = 2 * context.number(4, 8)
        scope, keys = context.v2_scope(slots), context.keys(slots)
        scope.store(keys)
        # The oldest ones are used, and then all the others looked up without a touch.
        used, others = keys[: slots // 2], keys[slots // 2 :]
        use(scope, used)
        scope.lookup(others, touch=False)
        context.lease_soon(
            scope, context.keys(slots // 4), "MD-EV-5", f"a scope of {slots} is full"
        )
        live = dict(zip(keys, scope.live(keys), strict=True))
        lost = sum(not live[key] for key in used)
        if lost and any(live[key] for key in others):
            raise Violation(
                "MD-EV-5",
                f"{lost} of {len(used)} pages that were just used were evicted, and some stayed "
                f"that were not",
            )


def _drawn(live: list[bool]) -> str:
    return "".join("x" if there else "." for there in live)
