"""`hicache metadata simulate`: load and capacity of a metadata server, by simulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from hicache_metadata_server.cli.options import exit_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from msgspec import Struct

    from hicache_metadata_server.simulation.cluster import ClusterSettings
    from hicache_metadata_server.simulation.costs import Costs
    from hicache_metadata_server.simulation.events import TraceEvent
    from hicache_metadata_server.simulation.result import SimulationResult
    from hicache_metadata_server.simulation.sizing import Needs, Wanted

# `Any`, as typer's own return type is: an option stands in the place of its value.
_load: Any = partial(typer.Option, rich_help_panel="Synthetic load")
_cluster: Any = partial(typer.Option, rich_help_panel="Cluster")
_sizing: Any = partial(typer.Option, rich_help_panel="Sizing")

OptionsT = TypeVar("OptionsT", bound="Struct")


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="Replay this file of events instead of a synthetic load.")
    ] = None,
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the synthetic load's events to this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engines: Annotated[int, _load(help="Engines, any of which may get any prompt.")] = 16,
    requests_per_second: Annotated[
        float, _load(help="Prompts of all engines together, per second.")
    ] = 20.0,
    seconds: Annotated[float, _load(help="Simulated time.")] = 600.0,
    page_tokens: Annotated[int, _load(help="Tokens in a page.")] = 64,
    prefixes: Annotated[int, _load(help="Number of different shared prefixes.")] = 200,
    prefix_tokens: Annotated[int, _load(help="Mean number of tokens of a shared prefix.")] = 2000,
    zipf: Annotated[
        float, _load(help="Skew of their popularity: prefix number n has the weight n ** -zipf.")
    ] = 1.0,
    turns: Annotated[float, _load(help="Mean number of prompts in a conversation.")] = 4.0,
    turn_tokens: Annotated[int, _load(help="Mean number of tokens that a turn adds.")] = 1000,
    think_seconds: Annotated[float, _load(help="Mean time between turns.")] = 30.0,
    affinity: Annotated[
        float, _load(help="Fraction of turns that go to the engine of the turn before.")
    ] = 0.0,
    engine_failures_per_hour: Annotated[
        float, _load(help="Failures of all engines together, per hour.")
    ] = 0.0,
    server_failures_per_hour: Annotated[
        float, _load(help="Failures of the server, per hour.")
    ] = 0.0,
    server_down_seconds: Annotated[float, _load(help="Duration of an outage of the server.")] = 3.0,
    seed: Annotated[int, _load(help="Seed of the load; equal seeds give equal loads.")] = 0,
    slots: Annotated[int, _cluster(help="Slots of each rank's scope.")] = 100_000,
    ranks: Annotated[
        int, _cluster(help="Ranks of an engine that hold different bytes; 1 for MLA.")
    ] = 8,
    page_bytes: Annotated[int, _cluster(help="Bytes of a page of one rank.")] = 1 << 20,
    local_pages: Annotated[int, _cluster(help="Pages that a rank keeps on its GPU and host.")] = 0,
    chains: Annotated[
        bool,
        _cluster(
            help="Engines send the prefix of each key, so that tails are evicted before heads."
        ),
    ] = True,
    write_seconds: Annotated[float, _cluster(help="Time from reserve to commit.")] = 0.05,
    lease_seconds: Annotated[
        float, _cluster(help="Duration of a lease, for which the slots of a dead writer are lost.")
    ] = 10.0,
    quarantine_seconds: Annotated[
        float, _cluster(help="Time that freed slots stay in quarantine.")
    ] = 5.0,
    warm_up_seconds: Annotated[
        float, _cluster(help="Simulated time before the counters start.")
    ] = 0.0,
    hit_ratio: Annotated[
        float | None,
        _sizing(help="Find the number of slots that gives this hit ratio.", min=0.0, max=1.0),
    ] = None,
    utilization: Annotated[
        float, _sizing(help="Mean utilization of a server's core.", min=0.01, max=1.0)
    ] = 0.5,
    measure: Annotated[
        bool,
        _sizing(
            "--measure",
            help="Measure the costs of a server on this machine, for about ten seconds.",
        ),
    ] = False,
) -> None:
    """Run the requests of a simulated cluster on the server's state machine, and print its needs.

    Except with --measure, equal options give equal results. docs/capacity.md explains the model and
    its limits.
    """
    from hicache_metadata_server.simulation.cluster import Cluster, ClusterSettings
    from hicache_metadata_server.simulation.events import record_trace
    from hicache_metadata_server.simulation.load import Load
    from hicache_metadata_server.simulation.sizing import needs_of, slots_for

    # All options by name, from which the settings of load and cluster are converted: 27 options
    # need not be named a third time.
    given = dict(locals())
    with exit_on_error():
        if trace is not None and write_trace is not None:
            raise ValueError("--write-trace writes a synthetic load; leave --trace out")
        load, settings = _checked(Load, given), _checked(ClusterSettings, given)
        source = _source(trace, load)
        # Before the simulation: a measurement that fails should not cost its minutes.
        costs = _costs(measure=measure)
        outcome = Cluster(settings).run(
            source() if write_trace is None else record_trace(source(), write_trace)
        )
        needs = needs_of(
            outcome, costs, ranks=ranks, page_bytes=page_bytes, utilization=utilization
        )
        wanted = None if hit_ratio is None else slots_for(hit_ratio, settings, source)
    if json:
        typer.echo(_json(outcome, needs, wanted, costs))
    else:
        _print(outcome, needs, wanted, costs, settings)


def _checked(kind: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    from msgspec import ValidationError, convert

    try:
        return convert({name: given[name] for name in kind.__struct_fields__}, kind)
    except ValidationError as error:
        # msgspec names the field at the end of its message; the command names the option.
        problem, _, name = str(error).rpartition(" - at `$.")
        raise ValueError(f"--{name.rstrip('`').replace('_', '-')}: {problem}") from error


def _source(trace: Path | None, load: Any) -> Callable[[], Iterable[TraceEvent]]:
    from hicache_metadata_server.simulation.events import read_trace
    from hicache_metadata_server.simulation.load import synthetic

    # A function rather than an iterator: the search for the number of slots replays the load.
    return (lambda: synthetic(load)) if trace is None else (lambda: read_trace(trace))


def _costs(*, measure: bool) -> Costs:
    from hicache_metadata_server.simulation import costs

    # The documented costs make results comparable between machines.
    return costs.measure() if measure else costs.DOCUMENTED


def _json(outcome: SimulationResult, needs: Needs, wanted: Wanted | None, costs: Costs) -> str:
    import msgspec

    found = {
        "outcome": outcome,
        "hit_ratio": outcome.hit_ratio,
        "needs": needs,
        "wanted": wanted,
        "costs": costs,
    }
    return msgspec.json.encode(found).decode()


def _print(
    outcome: SimulationResult,
    needs: Needs,
    wanted: Wanted | None,
    costs: Costs,
    settings: ClusterSettings,
) -> None:
    console = Console(highlight=False)
    each = "" if settings.ranks == 1 else f", {settings.ranks} ranks"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("simulated", f"{outcome.seconds:,.0f} s, {outcome.prompts:,} prompts{each}"),
        (
            "hit ratio",
            f"{outcome.hit_ratio:.1%} of the pages that were not in an engine's own cache",
        ),
        (
            "pages of a rank",
            (
                f"{outcome.local:,} found locally, {outcome.asked:,} asked for: "
                f"{outcome.hits:,} hits, {outcome.misses:,} misses; "
                f"{outcome.not_asked:,} not asked for"
            ),
        ),
        (
            "stored",
            (
                f"{outcome.stored:,}; {outcome.existing:,} were there, "
                f"{outcome.full:,} found no room, {outcome.lost:,} lost, "
                f"{outcome.unanswered:,} unanswered"
            ),
        ),
        (
            "scope",
            (
                f"{outcome.live:,} of {outcome.slots:,} slots live at the end, "
                f"{outcome.mean_occupancy:.1%} on the average; {outcome.evicted:,} evicted"
            ),
        ),
        *(
            (f"{kind} requests", f"{rate:,.1f} a second, {needs.keys_per_second[kind]:,.0f} keys")
            for kind, rate in needs.requests_per_second.items()
        ),
        ("busiest second", f"{needs.peak_requests_per_second:,} requests"),
        (
            "data",
            (
                f"{_bytes(needs.read_bytes_per_second)}/s read, "
                f"{_bytes(needs.written_bytes_per_second)}/s written, "
                f"{_bytes(needs.data_bytes)} of files"
            ),
        ),
        ("processor", f"{needs.cpu:.3f} s a second: {needs.servers} servers"),
        ("memory", f"{_bytes(needs.memory_bytes)} with every slot live"),
        (
            "costs",
            (
                f"lookup {costs.lookup.request:.0f} us + {costs.lookup.key:.2f} us a key, "
                f"reserve and commit {costs.pair.request:.0f} us + {costs.pair.key:.2f} us a key, "
                f"{costs.page_bytes:.0f} bytes a page ({costs.measured})"
            ),
        ),
    ):
        table.add_row(name, value)
    if wanted is not None:
        found = (
            f"no number of slots; endless ones give {wanted.best:.1%}"
            if wanted.slots is None
            else f"{wanted.slots:,} slots of a scope"
        )
        table.add_row(f"for {wanted.hit_ratio:.0%}", found)
    console.print(table)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} PiB"
