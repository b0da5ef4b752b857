"""One run of random calls under a plan of faults; may be repeated with less of either."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.faults.plan import FaultKind
from hicache_conformance.faults.scene import bounded, check_hits, check_kept, hurry, wait_until_serving
from hicache_conformance.faults.strike import struck
from hicache_conformance.history.events import Call
from hicache_conformance.needs import declares
from hicache_conformance.peers.messages import PoolShape
from hicache_conformance.peers.stage import Stage
from hicache_conformance.peers.watching import Strike
from hicache_conformance.violation import Violation
from hicache_storage.layers import StorageOptions
from hicache_storage.spec import HungReads, PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from hicache_conformance.faults.plan import FaultPlan
    from hicache_conformance.grounds.ground import Ground
    from hicache_conformance.lab import Lab
    from hicache_conformance.subject import Subject

KEYS: Final = 20
GUARDED: Final = StorageOptions(breaker_threshold=4, breaker_cooldown_seconds=0.05)
OTHERS: Final[Mapping[str, PoolShape]] = {PoolName.KV: PoolShape(pages=16, components=(3_000, 5_000))}
STRIKE, HEAL = "the faults begin", "the faults end"


@dataclass(frozen=True, slots=True)
class Step:
    """A call over some of the keys, or something else that happens."""

    what: str
    places: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} {list(self.places)}" if self.places else self.what


def drawn_steps(random: Random, count: int) -> list[Step]:
    """Random calls; the faults begin among the first of them."""
    steps = [
        Step(
            random.choice(("set", "set", "get", "get", "exists")),
            tuple(random.randrange(KEYS) for _ in range(random.randint(1, 8))),
        )
        for _ in range(count)
    ]
    # Some pages are there before anything goes wrong.
    return [Step("set", tuple(range(KEYS // 2))), *steps[:2], Step(STRIKE), *steps[2:], Step(HEAL)]


class Rehearsal:
    """Plays steps on a ground, each time with an identity and storages of its own."""

    def __init__(self, lab: Lab, ground: Ground) -> None:
        self.lab, self.ground = lab, ground

    def may_hang(self) -> bool:
        """Whether hangs are fair here: not for reads that wait by declaration, nor around methods that cannot hang by declaration."""
        # Asked of an open storage, because a driver may know only then what it stands on.
        promised = self.lab.storage().storage.capabilities
        return promised.hung_reads is HungReads.BOUNCE_BUFFER and (self.ground.name != "objects" or promised.may_hang)

    def has_others(self) -> bool:
        """Whether other engines may be at work in the same store."""
        return declares(self.lab.capabilities, "sharing>=processes")

    def play(self, plan: FaultPlan, steps: Sequence[Step]) -> Violation | None:
        """Make the calls; the rule that was broken, if one was."""
        subject, keys = self.lab.storage(options=GUARDED), self.lab.keys(KEYS)
        try:
            self._play(subject, keys, plan, steps)
        except Violation as violation:
            return violation
        finally:
            self.ground.heal()
            subject.storage.close()
        return None

    def fails_like(self, violation: Violation, plan: FaultPlan, steps: Sequence[Step]) -> bool:
        """Whether these faults and calls break the same rule."""
        found = self.play(plan, steps)
        return found is not None and found.rule == violation.rule

    def _kill_another(self, subject: Subject, place: float) -> None:
        """Let another engine of the same identity set pages of its own, and kill it in the middle."""
        stage = Stage(self.lab, OTHERS)
        stage.identity = subject.identity
        engine = stage.peer("another")
        work = stage.work(stage.new_keys(8), {Call.SET: 1}, calls=8, longest=4)
        stage.play({engine: work}, {engine: Strike(1 + int(place * 4), place)})
        engine.close()

    def _play(self, subject: Subject, keys: Sequence[str], plan: FaultPlan, steps: Sequence[Step]) -> None:
        stored = set[str]()
        for step in steps:
            chain = list(dict.fromkeys(keys[place] for place in step.places))
            match step.what:
                case "set":
                    answers = bounded(self.ground, plan, "batch_set_v2", partial(subject.set, chain))
                    stored.update(key for key, ok in zip(chain, answers, strict=True) if ok)
                case "get":
                    found = bounded(self.ground, plan, "batch_get_v2", partial(subject.get, chain))
                    check_hits(subject, chain, found, plan)
                case "exists":
                    bounded(self.ground, plan, "batch_exists_v2", partial(subject.exists, chain))
                case _ if step.what == STRIKE:
                    engine = struck(plan.faults, FaultKind.ENGINE)
                    if engine is not None:
                        self._kill_another(subject, engine.place)
                    hurry(subject)
                    self.ground.strike(plan)
                case _:
                    self.ground.heal()
        self.ground.heal()
        hurry(subject, None)
        wait_until_serving(self.lab, subject, plan)
        check_kept(self.lab, subject, sorted(stored), plan)
