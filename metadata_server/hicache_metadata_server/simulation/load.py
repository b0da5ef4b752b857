"""A synthetic load: conversations that begin with shared prefixes."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from hicache_metadata_server.simulation.events import Op, TraceEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a synthetic load. Lengths are in tokens; values with a mean are exponentially
    distributed."""

    engines: Positive = 16
    requests_per_second: Rate = 20.0
    """Rate of prompts of all engines together."""
    seconds: Rate = 600.0
    page_tokens: Positive = 64
    prefixes: Positive = 200
    """Number of shared prefixes: system prompts, documents or tools."""
    prefix_tokens: Natural = 2000
    """Mean length of a shared prefix."""
    zipf: Amount = 1.0
    """Exponent of their popularity: prefix number n has the weight n ** -zipf."""
    turns: Annotated[float, Meta(ge=1)] = 4.0
    """Mean number of prompts in a conversation; each contains all before it."""
    turn_tokens: Natural = 1000
    """Mean length of a turn: the question, and the answer before it."""
    think_seconds: Amount = 30.0
    """Mean time between two turns."""
    affinity: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of turns that go to the engine of the turn before; the others go to any engine."""
    engine_failures_per_hour: Amount = 0.0
    """Rate of failures of all engines together."""
    server_failures_per_hour: Amount = 0.0
    server_down_seconds: Amount = 3.0
    seed: Natural = 0


def synthetic(load: Load) -> Iterator[TraceEvent]:
    """Generate the events of a load in the order of time, the same for the same load."""
    return heapq.merge(_prompts(load), _failures(load), key=lambda event: event.time)


def _prompts(load: Load) -> Iterator[TraceEvent]:
    # A generator of its own for each part: other failures leave the prompts as they are.
    chance = random.Random(f"{load.seed}/prompts")
    prefixes = _Prefixes(load)
    starts, waiting = (
        load.requests_per_second / load.turns,
        list[tuple[float, int, _Conversation]](),
    )
    numbers, now = itertools.count(), 0.0
    while True:
        now += chance.expovariate(starts)
        # Turns due before the next conversation begins, so that events are in the order of time.
        while waiting and waiting[0][0] <= min(now, load.seconds):
            when, _, conversation = heapq.heappop(waiting)
            yield from conversation.turn(when, chance, waiting)
        if now > load.seconds:
            return
        number = next(numbers)
        _Conversation(load, number, prefixes.draw(chance), chance).begin(now, waiting)


class _Prefixes:
    """Keys of the shared prefixes, drawn by popularity."""

    def __init__(self, load: Load) -> None:
        chance = random.Random(f"{load.seed}/prefixes")
        self._keys = [
            [f"p{number}.{page}" for page in range(_pages(_mean(chance, load.prefix_tokens), load))]
            for number in range(load.prefixes)
        ]
        self._upto = list(
            itertools.accumulate((number + 1) ** -load.zipf for number in range(load.prefixes))
        )

    def draw(self, chance: random.Random) -> list[str]:
        return self._keys[bisect_left(self._upto, chance.random() * self._upto[-1])]


class _Conversation:
    def __init__(self, load: Load, number: int, prefix: list[str], chance: random.Random) -> None:
        self._load = load
        self._number = number
        self._prefix = prefix
        # A geometric distribution, whose mean is `turns`.
        self._left = (
            1
            if load.turns <= 1
            else 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / load.turns))
        )
        self._tokens = 0.0
        self._engine = chance.randrange(load.engines)

    def begin(self, now: float, waiting: list[tuple[float, int, _Conversation]]) -> None:
        heapq.heappush(waiting, (now, self._number, self))

    def turn(
        self, now: float, chance: random.Random, waiting: list[tuple[float, int, _Conversation]]
    ) -> Iterator[TraceEvent]:
        load = self._load
        self._tokens += _mean(chance, load.turn_tokens)
        if chance.random() >= load.affinity:
            self._engine = chance.randrange(load.engines)
        own = [f"c{self._number}.{page}" for page in range(_pages(self._tokens, load))]
        if self._prefix or own:
            yield TraceEvent(
                time=now, op=Op.PROMPT, engine=self._engine, keys=[*self._prefix, *own]
            )
        # The time to think begins with the prompt: the answer takes none in this model.
        self._left -= 1
        if self._left:
            heapq.heappush(waiting, (now + _mean(chance, load.think_seconds), self._number, self))


def _failures(load: Load) -> Iterator[TraceEvent]:
    chance = random.Random(f"{load.seed}/failures")
    engines, servers = load.engine_failures_per_hour / 3600, load.server_failures_per_hour / 3600
    now = 0.0
    while engines + servers > 0:
        now += chance.expovariate(engines + servers)
        if now > load.seconds:
            return
        if chance.random() * (engines + servers) < engines:
            yield TraceEvent(time=now, op=Op.ENGINE_FAILS, engine=chance.randrange(load.engines))
        else:
            yield TraceEvent(time=now, op=Op.SERVER_FAILS, seconds=load.server_down_seconds)


def _mean(chance: random.Random, mean: float) -> float:
    return chance.expovariate(1 / mean) if mean else 0.0


def _pages(tokens: float, load: Load) -> int:
    """Number of full pages; a partial page is not stored."""
    return int(tokens // load.page_tokens)
