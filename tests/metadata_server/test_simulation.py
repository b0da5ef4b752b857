"""The simulator: nothing is lost in it, and it says the same each time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hicache_metadata_server.simulation import costs
from hicache_metadata_server.simulation.cluster import Cluster, ClusterSettings
from hicache_metadata_server.simulation.costs import DOCUMENTED, Costs, Line
from hicache_metadata_server.simulation.events import (
    Op,
    TraceError,
    TraceEvent,
    read_trace,
    record_trace,
)
from hicache_metadata_server.simulation.load import Load, synthetic
from hicache_metadata_server.simulation.result import SimulationResult
from hicache_metadata_server.simulation.sizing import needs_of, slots_for
from tests.metadata_server.histories import problems_of
from tests.support.commands import run_metadata

LOADS = st.builds(
    Load,
    engines=st.integers(1, 5),
    requests_per_second=st.floats(0.5, 5),
    seconds=st.floats(10, 60),
    prefixes=st.integers(1, 8),
    prefix_tokens=st.sampled_from((0, 100, 20_000)),
    zipf=st.floats(0, 2),
    turns=st.floats(1, 5),
    turn_tokens=st.sampled_from((0, 300, 2000)),
    think_seconds=st.floats(0, 10),
    affinity=st.floats(0, 1),
    engine_failures_per_hour=st.sampled_from((0, 2000)),
    server_failures_per_hour=st.sampled_from((0, 1000)),
    seed=st.integers(0, 2**32),
)
CLUSTERS = st.builds(
    ClusterSettings,
    slots=st.sampled_from((1, 50, 1100, 100_000)),
    ranks=st.integers(1, 4),
    local_pages=st.sampled_from((0, 20, 1000)),
    chains=st.booleans(),
    write_seconds=st.sampled_from((0, 0.05, 20)),
    lease_seconds=st.sampled_from((1, 10)),
    quarantine_seconds=st.sampled_from((0, 5)),
    warm_up_seconds=st.sampled_from((0, 20)),
)


def hicache(*arguments):
    return run_metadata("simulate", *arguments)


@settings(max_examples=40, deadline=None)
@given(load=LOADS, chosen=CLUSTERS)
def test_every_page_is_accounted_for(load, chosen):
    cluster, events = Cluster(structs.replace(chosen, warm_up_seconds=0)), list(synthetic(load))
    outcome = cluster.run(events)
    prompts = [event for event in events if event.op is Op.PROMPT]
    assert outcome.prompts == len(prompts)
    assert outcome.local + outcome.asked + outcome.not_asked == sum(
        len(event.keys) for event in prompts
    )
    assert outcome.hits + outcome.misses == outcome.asked
    assert 0 <= outcome.usable <= outcome.hits
    writing = sum(len(commit.keys) for commit in cluster._writing)
    to_store = outcome.asked + outcome.not_asked - outcome.usable
    unanswered_lookups = outcome.unanswered - (
        to_store - outcome.stored - outcome.existing - outcome.full - outcome.lost - writing
    )
    assert 0 <= unanswered_lookups <= outcome.asked
    for scope in cluster.service.scopes.values():
        assert problems_of(scope) == []
    told = cluster.service.list_scopes().scopes
    if not load.server_failures_per_hour:
        assert outcome.unanswered == 0
        # The lookups before a read hit, too.
        reads = outcome.read_pages // chosen.ranks
        assert sum(scope.misses for scope in told) == outcome.misses
        assert sum(scope.hits for scope in told) == outcome.hits + reads
        assert reads == outcome.usable
    assert sum(scope.live for scope in told) == outcome.stored - outcome.evicted
    assert all(count % chosen.ranks == 0 for count in outcome.requests.values())


@settings(max_examples=15, deadline=None)
@given(load=LOADS, chosen=CLUSTERS)
def test_a_trace_says_what_its_source_says(load, chosen, tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "t.jsonl"
    outcome = Cluster(chosen).run(record_trace(synthetic(load), file))
    assert Cluster(chosen).run(read_trace(file)) == outcome
    assert Cluster(chosen).run(synthetic(load)) == outcome


@settings(max_examples=40, deadline=None)
@given(
    keys=st.lists(st.integers(0, 60), min_size=1, max_size=300),
    slots=st.integers(1, 40),
    chance=st.randoms(),
)
def test_more_slots_never_hit_less(keys, slots, chance):
    """Least recently used is a stack algorithm: what a small cache holds, a larger one holds,
    too."""
    events = [
        TraceEvent(time=float(i), op=Op.PROMPT, keys=[f"k{key}"]) for i, key in enumerate(keys)
    ]
    chosen = ClusterSettings(
        slots=slots, ranks=1, chains=False, write_seconds=0, quarantine_seconds=0
    )
    hits = [
        Cluster(structs.replace(chosen, slots=slots << doubled)).run(events).hits
        for doubled in range(4)
    ]
    assert hits == sorted(hits)
    # What a list says that is kept by hand.
    order, expected = [], 0
    for key in keys:
        if key in order:
            expected += 1
            order.remove(key)
        order = [*order, key][-slots:]
    assert hits[0] == expected
    assert hits[3] <= len(keys) - len(set(keys))


def test_what_each_event_does():
    chosen = ClusterSettings(slots=1000, ranks=2, write_seconds=1.0, local_pages=10)
    pages = [f"k{i}" for i in range(200)]
    events = [
        TraceEvent(time=0, op=Op.PROMPT, engine=0, keys=pages),
        TraceEvent(time=2, op=Op.LOOKUP, keys=pages[:3]),
        TraceEvent(time=3, op=Op.PROMPT, engine=0, keys=pages),
        TraceEvent(time=4, op=Op.PROMPT, engine=1, keys=pages),
        TraceEvent(time=5, op=Op.STORE, engine=2, keys=["a", "b"]),
        TraceEvent(time=5.5, op=Op.ENGINE_FAILS, engine=2),
        TraceEvent(time=6, op=Op.STORE, engine=1, keys=["c"]),
        TraceEvent(time=6.5, op=Op.SERVER_FAILS, seconds=2),
        TraceEvent(time=7, op=Op.PROMPT, engine=3, keys=["d"]),
        TraceEvent(time=9, op=Op.DELETE, keys=pages[:50]),
        TraceEvent(time=10, op=Op.LOOKUP, keys=pages[:60]),
        TraceEvent(time=11, op=Op.LOOKUP, rank=1, keys=["k0"]),
        TraceEvent(time=11, op=Op.ENGINE_FAILS, engine=0),
        TraceEvent(time=12, op=Op.PROMPT, engine=0, keys=pages[50:60]),
    ]
    outcome = Cluster(chosen).run(events)
    assert (outcome.stored, outcome.lost, outcome.full) == (200, 3, 0)
    assert outcome.local == 10, "of the prompt that engine 0 has had before"
    assert outcome.unanswered == 2, "one page was not looked up, and not stored"
    assert outcome.usable == 190 + 200 + 10
    assert (outcome.hits, outcome.misses) == (3 + 190 + 200 + 10 + 10, 128 + 50 + 1 + 1)
    assert outcome.not_asked == 72
    assert outcome.scopes == 2
    # One prompt alone asks twice for its 200 pages, and twice before it reads them; what one rank
    # does alone counts once.
    assert outcome.requests["lookup"] == 2 * (1 + 1 + 4 + 4 + 1 + 1 + 2) + 1
    assert outcome.requests["reserve"] == 2 * 4
    assert outcome.requests["commit"] == 2 * 2
    assert outcome.requests["delete"] == 2


def test_the_time_to_warm_up_does_not_count():
    load = Load(engines=2, requests_per_second=5, seconds=100, prefixes=3, seed=4)
    whole = Cluster(ClusterSettings(slots=10_000)).run(synthetic(load))
    late = Cluster(ClusterSettings(slots=10_000, warm_up_seconds=50)).run(synthetic(load))
    assert late.hit_ratio > whole.hit_ratio
    assert 45 < late.seconds <= 50
    assert late.prompts < whole.prompts
    shifted = [structs.replace(event, time=event.time + 1e9) for event in synthetic(load)]
    moved = Cluster(ClusterSettings(slots=10_000, warm_up_seconds=50)).run(shifted)
    assert moved.hits == late.hits


def test_slots_for_a_hit_ratio():
    load = Load(
        engines=2, requests_per_second=10, seconds=60, prefixes=20, turns=1, turn_tokens=200, seed=2
    )
    chosen = ClusterSettings(slots=64, write_seconds=0, quarantine_seconds=0)

    def ratio(slots):
        return Cluster(structs.replace(chosen, slots=slots)).run(synthetic(load)).hit_ratio

    best = ratio(10**6)
    found = slots_for(best / 2, chosen, lambda: synthetic(load))
    assert found.slots is not None
    assert ratio(found.slots) >= best / 2
    assert ratio(int(found.slots / 1.1)) < best / 2
    never = slots_for(min(1.0, best + 0.01), chosen, lambda: synthetic(load))
    assert (never.slots, never.best) == (None, best)


def test_what_a_cluster_needs():
    known = Costs(Line(100, 1), Line(1000, 10), 400, 1e8, "here")
    outcome = SimulationResult(seconds=10, slots=1000, scopes=1, read_pages=50, written_pages=20)
    outcome.requests.update({"lookup": 10_000, "reserve": 1000, "commit": 1000})
    outcome.keys.update({"lookup": 1_000_000, "reserve": 100_000, "commit": 100_000})
    needs = needs_of(outcome, known, ranks=8, page_bytes=1 << 20, utilization=0.25)
    assert needs.cpu == pytest.approx((1000 * 100 + 100_000 * 1 + 100 * 1000 + 10_000 * 10) / 1e6)
    assert needs.servers == 2
    assert needs.memory_bytes == 2 * 1e8 + 8000 * 400
    assert (needs.read_bytes_per_second, needs.written_bytes_per_second) == (5 << 20, 2 << 20)
    assert needs.data_bytes == 8000 << 20
    assert Line.through(5, 259) == Line(3, 2)


def test_the_command_says_the_same_each_time(tmp_path):
    options = (
        "--seconds",
        60,
        "--seed",
        3,
        "--slots",
        2000,
        "--server-failures-per-hour",
        200,
        "--json",
    )
    first = hicache(*options, "--write-trace", tmp_path / "t.jsonl", "--hit-ratio", "0.3")
    assert first.exit_code == 0, first.output
    found = json.loads(first.output)
    assert found["outcome"]["hits"] + found["outcome"]["misses"] == found["outcome"]["asked"]
    assert found["wanted"]["slots"] > 0
    assert hicache(*options, "--hit-ratio", "0.3").output == first.output
    replayed = json.loads(
        hicache("--trace", tmp_path / "t.jsonl", "--slots", 2000, "--json").output
    )
    assert replayed["outcome"] == found["outcome"]
    assert replayed["needs"] == found["needs"]
    other = json.loads(hicache(*options[:2], "--seed", 4, *options[4:]).output)
    assert other["outcome"] != found["outcome"]
    table = hicache(*options[:-1])
    assert table.exit_code == 0
    assert "hit ratio" in table.output
    assert "servers" in table.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--zipf", "-1"), "zipf"),
        (("--turns", "0.5"), "turns"),
        (("--affinity", "2"), "affinity"),
        (("--slots", "0"), "slots"),
        (("--hit-ratio", "7"), "hit-ratio"),
        (("--trace", "/nonexistent"), "No such file"),
        (("--trace", "x", "--write-trace", "y"), "leave --trace out"),
    ],
)
def test_options_that_cannot_be(options, said):
    done = hicache(*options)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1}',
        '{"time": -1, "op": "prompt"}',
        '{"time": 1, "op": "fly"}',
        '{"time": 5, "op": "prompt", "key": []}',
        '{"time": 0.1, "op": "prompt"}',
        "[]",
        "\xff",
    ],
)
def test_lines_that_are_no_events(line, tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"time": 1, "op": "prompt", "keys": ["a"]}\n\n' + line + "\n", "latin-1")
    with pytest.raises(TraceError, match="line 3"):
        list(read_trace(file))


def test_a_measured_server(monkeypatch):
    """For a moment: how much it takes is no matter here."""
    monkeypatch.setattr(costs, "CPU_SECONDS", 0.05)
    monkeypatch.setattr(costs, "FILL_PAGES", 6400)
    found = costs.measure()
    assert found.lookup.request + found.lookup.key > 0
    assert found.pair.request + found.pair.key > 0
    assert found.base_bytes > 10e6
    assert DOCUMENTED.cpu({"lookup": 1.0}, {"lookup": 128.0}) > 0
