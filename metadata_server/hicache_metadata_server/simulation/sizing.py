"""Sizing of a cluster from the counts of a simulation."""

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
"""Accuracy of the search for slots, as a factor."""


class Needs(msgspec.Struct, frozen=True):
    """Resources of the whole cluster."""

    requests_per_second: dict[str, float]
    keys_per_second: dict[str, float]
    peak_requests_per_second: int
    read_bytes_per_second: float
    written_bytes_per_second: float
    cpu: float
    """Seconds of CPU time a second."""
    servers: int
    memory_bytes: float
    """Memory of all servers together, with every slot live."""
    data_bytes: int
    """Bytes of the slot files."""


def needs_of(
    outcome: SimulationResult, costs: Costs, *, ranks: int, page_bytes: int, utilization: float
) -> Needs:
    """Compute the resources of a cluster.

    Args:
        outcome: counts of its simulation.
        costs: costs of one server.
        ranks: ranks that hold different bytes.
        page_bytes: bytes of a page.
        utilization: mean share of one core that each server may use.
    """
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
    """Result of the search for a hit ratio."""

    hit_ratio: float
    slots: int | None
    """Slots of each scope; None if no number of slots is enough."""
    best: float
    """Hit ratio of the largest simulated scope."""


def slots_for(
    wanted: float, settings: ClusterSettings, events: Callable[[], Iterable[TraceEvent]]
) -> Wanted:
    """Find the smallest number of slots with a hit ratio, within 5 %, by simulations."""
    slots, too_few = settings.slots, 0
    # An upper bound first, by doubling; then a bisection.
    while True:
        outcome = Cluster(structs.replace(settings, slots=slots)).run(events())
        if outcome.hit_ratio >= wanted:
            break
        # Without evictions, more slots would change nothing.
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
