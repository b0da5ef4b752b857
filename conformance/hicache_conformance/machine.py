"""The state machine behind the random histories, and the dictionary that it compares a storage with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from hicache_conformance.memory import GuardedPool
from hicache_conformance.needs import declares
from hicache_conformance.oracle import Asked, check
from hicache_conformance.pages import short
from hicache_conformance.subject import all_pages, block_groups, trailing
from hicache_conformance.violation import Violation
from hicache_storage.plugins import registry
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.lab import Lab
    from hicache_conformance.subject import Subject
    from hicache_storage.spec import PoolTransfer

KEYS = 6
PLACES = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=10)
POOLS = st.integers(0, 2)
SPEAKERS = st.integers(0, 1)
GENERATIONS = st.integers(0, 3)
WINDOWS = st.integers(0, 4)


def check_histories(lab: Lab, pools: Sequence[str]) -> None:
    """Run as many random histories as the profile says.

    Raises:
        Violation: the first rule found broken, with the shortest history found that breaks it as a note.
    """
    phases = [Phase.generate, *([Phase.shrink] if lab.profile.shrinks else [])]
    settings = hypothesis.settings(
        max_examples=lab.profile.histories,
        stateful_step_count=lab.profile.steps,
        deadline=None,
        database=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
    )

    def machine() -> _Machine:
        return _Machine(lab, pools)

    try:
        seeded: Any = hypothesis.seed(lab.number("histories"))(machine)
        run_state_machine_as_test(seeded, settings=settings)
    except FlakyFailure as flaky:
        # The same calls failed once and passed once. What failed is still a failure.
        violation = next((error for error in flaky.exceptions if isinstance(error, Violation)), None)
        if violation is None:
            raise
        violation.add_note("The same history passed when it was tried again.")
        raise violation from flaky


class _Machine(RuleBasedStateMachine):
    """Two storages of one identity where the driver shares pages, one where it does not, and what they must hold."""

    def __init__(self, lab: Lab, pools: Sequence[str]) -> None:
        super().__init__()
        self.lab, self.pools = lab, list(pools)
        self.identity = lab.identity()
        self.stored = dict[tuple[str, str], int]()
        """Generation by pool and key."""
        self.keys = lab.keys(KEYS)
        # Dozens of storages are opened in a history. A directory of its own spares each of them from looking through what the
        # writers of all histories before have left; a server's is larger than that is worth.
        self.config = lab.config if registry().get(lab.driver).trial_services else lab.apart()[0]
        self.subjects: list[Subject] = []
        self._open()

    @rule(pool=POOLS, places=PLACES, generation=GENERATIONS, speaker=SPEAKERS)
    def set(self, pool: int, places: list[int], generation: int, speaker: int) -> None:
        name, chain = self._pool(pool), self._chain(places)
        self._speaker(speaker).store(chain, name, generation=generation)
        for key in chain:
            self.stored.setdefault((name, key), generation)

    @rule(pool=POOLS, places=PLACES, speaker=SPEAKERS)
    def get(self, pool: int, places: list[int], speaker: int) -> None:
        name, chain, subject = self._pool(pool), self._chain(places), self._speaker(speaker)
        for index, (key, content) in enumerate(zip(chain, subject.get(chain, name), strict=True)):
            generation = self.stored.get((name, key))
            if generation is not None:
                subject.compare([key], [content], name, generation=generation)
            elif content is not None:
                held = subject.explain(key, content, name) or "its own bytes"
                raise Violation(
                    "GET-1", f"page {index} key {short(key)} of pool {name!r} is not there, and a get delivers {held}"
                )

    @rule(places=PLACES, windows=st.tuples(WINDOWS, WINDOWS), speaker=SPEAKERS)
    def exists(self, places: list[int], windows: tuple[int, int], speaker: int) -> None:
        chain = self._chain(places)
        if not self.lab.dialect.block_groups:
            windows = (windows[0] % 4, windows[1] % 4)
        transfers = [_policy(pool, window) for pool, window in zip(self.pools[1:], windows, strict=False)]
        present = {pool: [(pool, key) in self.stored for key in chain] for pool in self.pools}
        answer = self._speaker(speaker).exists(chain, *transfers)
        asked = [Asked(transfer, present[transfer.name]) for transfer in transfers]
        check(answer, present[PoolName.KV], asked, verdicts=self.lab.dialect.pool_verdicts)

    @precondition(lambda self: self.lab.capabilities.deletes)
    @rule(pool=POOLS, places=PLACES, speaker=SPEAKERS)
    def delete(self, pool: int, places: list[int], speaker: int) -> None:
        name, doomed, subject = self._pool(pool), list(dict.fromkeys(self._chain(places))), self._speaker(speaker)
        removed = subject.call("delete", lambda: subject.storage.delete(doomed, pool=name))
        wanted = [self.stored.pop((name, key), None) is not None for key in doomed]
        if list(removed) != wanted:
            raise Violation(
                "SET-1", f"deleting {[short(key) for key in doomed]} from {name!r} answered {removed}, must be {wanted}"
            )

    @precondition(lambda self: self.lab.capabilities.clears and self.lab.dialect.clears_at_once)
    @rule(speaker=SPEAKERS)
    def clear(self, speaker: int) -> None:
        subject = self._speaker(speaker)
        subject.call("clear", subject.storage.clear)
        self.stored.clear()

    @rule()
    def reopen(self) -> None:
        self._close()
        if not declares(self.lab.capabilities, "durability>=reopen"):
            # Pages may be gone and may be there; a new identity has none for certain.
            self.identity = replace(self.identity, salt=f"{self.identity.salt}+")
            self.stored.clear()
        self._open()

    def teardown(self) -> None:
        self._close()

    def _open(self) -> None:
        count = 2 if declares(self.lab.capabilities, "sharing>=process") else 1
        self.subjects = [
            self.lab.storage(
                self.identity,
                pools={pool: GuardedPool(pages=16, components=(40, 24)) for pool in self.pools},
                config=self.config,
            )
            for _ in range(count)
        ]

    def _close(self) -> None:
        for subject in self.subjects:
            subject.call("close", subject.storage.close)

    def _speaker(self, number: int) -> Subject:
        return self.subjects[number % len(self.subjects)]

    def _pool(self, number: int) -> str:
        return self.pools[number % len(self.pools)]

    def _chain(self, places: Sequence[int]) -> list[str]:
        chain = [self.keys[place] for place in places]
        return chain if self.lab.dialect.repeated_keys else list(dict.fromkeys(chain))


def _policy(pool: str, window: int) -> PoolTransfer:
    if window == 0:
        return all_pages(pool)
    return block_groups(pool, 2, 1) if window == 4 else trailing(pool, window)
