"""The simulator: order within a stream, events as CUDA has them, races found whatever the timing,
errors."""

from __future__ import annotations

import itertools
import re
from contextlib import closing

import pytest
import torch

from hicache_storage.transfer import StreamFailedError, StreamSimulator
from hicache_storage.transfer.simulator import byte_runs


@pytest.fixture
def simulator():
    with closing(StreamSimulator("tests")) as made:
        yield made


def numbers(value, count=64):
    return torch.full((count,), value, dtype=torch.uint8)


def test_streams_overtake_each_other():
    """Nothing orders two streams: by the seed, either is first, and the host sees both orders."""
    last, seen = set(), set()
    for seed in range(20):
        with closing(StreamSimulator(seed)) as simulator:
            memory, events = numbers(0), []
            for value, name in ((1, "a"), (2, "b")):
                stream = simulator.stream(name)
                stream.copy(memory, numbers(value), name)
                events.append(stream.record())
            seen.add(tuple(event.query() for event in events))
        last.add(int(memory[0]))
    assert last == {1, 2}
    assert len(seen) > 2


def test_copies_take_effect_when_they_run_and_in_order(simulator):
    stream, memory, source = simulator.stream("a"), numbers(0), numbers(1)
    for value in range(30):
        stream.copy(memory, numbers(value), f"write {value}")
    stream.copy(memory, source, "copy")
    source.fill_(77)
    assert not memory.any()
    # Closing runs what is left.
    simulator.is_held = True
    simulator.close()
    assert torch.equal(memory, numbers(77))
    assert not simulator.races


@pytest.mark.parametrize(
    ("steps", "races"),
    [
        ("a writes 0:64; b reads 0:64", ["a writes, b reads"]),
        ("a writes 0:64; b after a; b reads 0:64", []),
        # Order is transitive, and a wait for one stream is none for another.
        ("a writes 0:64; b after a; b writes 64:96; c after b; c writes 0:64", []),
        ("a reads 0:64; b reads 0:64; c after a; c writes 0:64", ["b reads, c writes"]),
        ("a writes 0:32; b writes 32:64; b writes 31:33", ["a writes, b writes"]),
        # The host waits for nothing here, and what it does is before all that it enqueues.
        ("host writes 0:64; a reads 0:64; host writes 0:64", ["a reads, host writes"]),
        # What has ended is ordered only where the host has seen it.
        ("a writes 0:64; other runs; b writes 0:64", ["a writes, b writes"]),
        *[
            (f"a writes 0:64; a {seen}; b writes 0:64; host reads 0:64", ["b writes, host reads"])
            for seen in ("waited", "synchronized", "asked")
        ],
    ],
)
def test_what_nothing_orders_is_a_race(simulator, steps, races):
    streams, memory = {name: simulator.stream(name) for name in "abc"}, numbers(0, 96)
    for step in steps.split("; "):
        who, deed, *what = step.split()
        match deed:
            case "after":
                streams[who].wait_event(streams[what[0]].record())
            case "waited":
                streams[who].record().synchronize()
            case "synchronized":
                streams[who].synchronize()
            case "asked":
                event = streams[who].record()
                while not event.query():
                    pass
            case "runs":
                while not memory.any():
                    simulator.stream(who).record().query()
            case "reads" | "writes":
                part, name = memory[slice(*map(int, what[0].split(":")))], f"{who} {deed}"
                if who == "host":
                    simulator.host(name, **{deed: [part]})
                elif deed == "writes":
                    streams[who].copy(part, numbers(1, len(part)), name)
                else:
                    streams[who].copy(numbers(0, len(part)), part, name)
    found = [re.findall("'(.*?)'", race) for race in simulator.races]
    assert [f"{first}, {second}" for second, first in found] == races


def test_an_error_surfaces_where_it_is_waited_for(simulator):
    stream, other, memory = simulator.stream("a"), simulator.stream("b"), numbers(0)
    stream.copy(memory, numbers(1, 3), "shapes differ")
    event = stream.record()
    for wait in (event.synchronize, stream.synchronize, event.query):
        with pytest.raises(StreamFailedError, match="an operation failed") as raised:
            wait()
        assert isinstance(raised.value.__cause__, RuntimeError)
    # Nobody hangs who waits for a stream that has failed.
    other.wait_event(event)
    other.synchronize()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[1:3],
        lambda t: t[:, 1],
        lambda t: t[..., 2:4],
        lambda t: t.transpose(0, 2),
        lambda t: t[1, :, ::2],
        lambda t: t[:0],
        lambda t: t[0, 0, 0],
    ],
)
def test_byte_runs_are_the_elements_of_a_view(view):
    tensor = torch.arange(3 * 4 * 6, dtype=torch.int16).view(3, 4, 6)
    runs, base = byte_runs(view(tensor)), tensor.data_ptr()
    covered = sorted(address for start, end in runs for address in range(start, end))
    assert covered == sorted(
        base + 2 * int(element) + byte for element in view(tensor).reshape(-1) for byte in (0, 1)
    )
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(runs))
