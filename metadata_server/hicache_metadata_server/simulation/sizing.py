"""What a cluster needs, from what a simulation has counted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from hicache_metadata_server.simulation.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache_metadata_server.simulation.cluster import ClusterSettings
    from hicache_metadata_server.simulation.costs import Costs
    from hicache_metadata_server.simulation.events import TraceEvent
    from hicache_metadata_server.simulation.result import SimulationResult

CLOSE: Final = 1.05
"""Slots are looked for up to this factor."""


class Needs(msgspec.Struct, frozen=True):
    """Of the whole cluster."""

    requests_per_second: dict[str, float]
    keys_per_second: dict[str, float]
    peak_requests_per_second: int
    read_bytes_per_second: float
    written_bytes_per_second: float
    cpu: float
    """Seconds of processor time a second."""
    servers: int
    memory_bytes: float
    """Of all servers together, with every slot live."""
    data_bytes: int
    """Of the files."""


def needs_of(
    outcome: SimulationResult, costs: Costs, *, ranks: int, page_bytes: int, utilization: float
) -> Needs:
    """Each server has one core, of which no more than `utilization` is to be used on the average;
    one is the least."""
    requests = {kind: outcome.a_second(count) for kind, count in sorted(outcome.requests.items())}
    keys = {kind: outcome.a_second(count) for kind, count in sorted(outcome.keys.items())}
    cpu, slots = costs.cpu(requests, keys), outcome.slots * max(ranks, outcome.scopes)
    servers = max(1, math.ceil(cpu / utilization))
    return Needs(
        requests,
        keys,
        outcome.peak_requests,
        outcome.a_second(outcome.read_pages) * page_bytes,
        outcome.a_second(outcome.written_pages) * page_bytes,
        cpu,
        servers,
        servers * costs.base_bytes + slots * costs.page_bytes,
        slots * page_bytes,
    )


class Wanted(msgspec.Struct, frozen=True):
    """Slots for a hit ratio."""

    hit_ratio: float
    slots: int | None
    """Of each scope; None where no number of slots is enough."""
    best: float
    """What endless slots give."""


def slots_for(
    wanted: float, settings: ClusterSettings, events: Callable[[], Iterable[TraceEvent]]
) -> Wanted:
    """The least number of slots that gives a hit ratio, 5% too many at most; each try is a
    simulation of its own."""
    slots, too_few = settings.slots, 0
    while True:
        outcome = Cluster(structs.replace(settings, slots=slots)).run(events())
        if outcome.hit_ratio >= wanted:
            break
        if not outcome.evicted and not outcome.full:
            return Wanted(wanted, None, outcome.hit_ratio)
        slots, too_few = 2 * slots, slots
    enough, best = slots, outcome.hit_ratio
    while enough > CLOSE * max(too_few, 1) and enough - too_few > 1:
        between = (too_few + enough) // 2
        outcome = Cluster(structs.replace(settings, slots=between)).run(events())
        if outcome.hit_ratio >= wanted:
            enough = between
        else:
            too_few = between
    return Wanted(wanted, enough, best)
