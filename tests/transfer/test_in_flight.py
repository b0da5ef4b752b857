"""Memory under copies in flight: it stays until they are over, whoever lets go of it and whatever
fails."""

from __future__ import annotations

import gc
import threading

import pytest
from transfer_bench import PAGE as PAGE_SIZE
from transfer_bench import PAGES, POOLS, Bench

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import HybridTransfers, Indices, LayerMap, PoolPair, StreamFailedError
from hicache_storage.transfer.engine import IN, OUT
from hicache_storage.transfer.plan import WAYS
from hicache_storage.transfer.simulator.simulator import SimulatedRows

RELEASE_SECONDS = 0.05


def held_copy(bench, direction=OUT):
    """A copy that cannot go on for a while; what tells that it is over."""
    if direction == OUT:
        host = bench.alloc()
        hold = bench.hold_write_backs_into(host)
        copy = bench.engine.write_back(bench.slots(2), host)
    else:
        hold = bench.hold_loads_into(2)
        copy = bench.engine.load(bench.filled_host(bench.content(0)), bench.slots(2))
    assert not copy.done()
    threading.Timer(RELEASE_SECONDS, hold.release).start()
    return copy


@pytest.mark.parametrize("direction", [OUT, IN])
def test_closing_waits_for_copies_and_takes_no_more(simulated, direction):
    bench = Bench(simulated, "mha", "page_first", None)
    with bench.engine as engine:
        copy = held_copy(bench, direction)
    assert copy.done()
    engine.close()
    for call in (engine.write_back, engine.load):
        with pytest.raises(InvalidTransferError, match="closed"):
            call(bench.slots(0), bench.slots(0))


@pytest.mark.parametrize("way", WAYS)
def test_whoever_drops_the_pools_waits_for_their_copies(simulated, way):
    bench = Bench(simulated, "mha", "page_first", way)
    acknowledgement = held_copy(bench)
    del bench
    gc.collect()
    assert acknowledgement.done()


def test_a_failed_copy_is_told_when_it_is_closed(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    hold = bench.hold_write_backs_into(bench.slots(0))
    bench.engine.write_back(bench.slots(2), bench.slots(0))
    monkeypatch.setattr(SimulatedRows, "pages", broken)
    hold.release()
    with pytest.raises(StreamFailedError, match="the bus is gone"):
        bench.engine.close()
    bench.engine.close()


def test_pools_moved_together_are_closed_together(simulated):
    benches = {layout: Bench(simulated, "mha", layout, None) for _, layout in POOLS[:2]}
    pairs = {
        name: PoolPair(bench.device_pool, bench.host_pool, LayerMap(range(3)))
        for name, bench in benches.items()
    }
    with HybridTransfers(simulated.device, simulated.device.stream("compute"), pairs) as transfers:
        bench = benches["page_first"]
        hold = bench.hold_write_backs_into(bench.slots(0))
        acknowledgement = transfers.write_back(
            {name: Indices(bench.slots(2), bench.slots(0)) for name in benches}
        )
        threading.Timer(RELEASE_SECONDS, hold.release).start()
    assert acknowledgement.done()
    with pytest.raises(InvalidTransferError, match="closed"):
        transfers.write_back({"page_first": Indices(bench.slots(2), bench.slots(0))})


# What fails
# ---------------------------------------------------------------------------------------------------------------


def broken(*arguments):
    raise RuntimeError("the bus is gone")


def failing(bench, monkeypatch):
    """Copies are enqueued, and then something fails; what the host pages are that they use."""
    copies = bench.engine._copies[OUT]
    enqueue_all = copies.enqueue_all

    def fail():
        enqueue_all()
        raise RuntimeError("a later copy is refused")

    monkeypatch.setattr(copies, "enqueue_all", fail)
    return bench.alloc()


def fail_write_back(bench, host, hold=None):
    if hold is not None:
        threading.Timer(RELEASE_SECONDS, hold.release).start()
    with pytest.raises(RuntimeError, match="a later copy is refused"):
        bench.engine.write_back(bench.slots(2), host)
    bench.engine.host_slots.free(host)
    bench.place.run_what_can()
    return bench.engine.host_slots.available_size() == bench.host_pool.size


def test_host_pages_stay_until_what_was_enqueued_before_a_failure_is_over(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = failing(bench, monkeypatch)
    hold = bench.hold_write_backs_into(host)
    assert not fail_write_back(bench, host)
    hold.release()
    bench.engine.streams[OUT].synchronize()
    assert bench.engine.host_slots.available_size() == bench.host_pool.size


def without_events(bench, monkeypatch):
    """No event can be recorded any more on the stream of write-backs."""
    event = bench.place.device.event

    def refusing():
        made = event()
        record = made.record
        made.record = lambda stream: (
            broken() if stream is bench.engine.streams[OUT] else record(stream)
        )
        return made

    monkeypatch.setattr(bench.place.device, "event", refusing)


def test_without_an_event_the_stream_is_waited_for(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = failing(bench, monkeypatch)
    without_events(bench, monkeypatch)
    hold = bench.hold_write_backs_into(host)
    assert fail_write_back(bench, host, hold)
    assert not hold.expired
    bench.engine.streams[OUT].synchronize()


def test_pages_of_a_stream_that_tells_nothing_are_not_handed_out_again(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = failing(bench, monkeypatch)
    without_events(bench, monkeypatch)
    monkeypatch.setattr(bench.engine.streams[OUT], "synchronize", broken)
    assert not fail_write_back(bench, host)
    assert bench.alloc(PAGES) is None


def test_a_load_that_fails_holds_its_pages_too(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = bench.filled_host(bench.content(0))
    load = bench.engine.load_layer
    monkeypatch.setattr(
        bench.engine, "load_layer", lambda layer: broken() if layer else load(layer)
    )
    hold = bench.hold_loads_into(2)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        bench.engine.load(host, bench.slots(2))
    bench.engine.host_slots.free(host)
    assert bench.alloc(PAGES) is None
    hold.release()
    bench.engine.streams[IN].synchronize()
    assert bench.alloc(PAGES) is not None


@pytest.mark.parametrize("direction", [OUT, IN])
def test_a_staging_buffer_whose_filling_fails_is_waited_for(simulated, monkeypatch, direction):
    """Some of its copies were enqueued on a stream of their own: pages are kept for them, too."""
    bench = Bench(simulated, "mha", "page_first_direct", "dma")
    staging, slots = bench.staging(direction), bench.engine.host_slots
    step = "copy_rows" if direction == OUT else "copy_pieces"
    fill = getattr(staging.filler, step)
    monkeypatch.setattr(staging.filler, step, lambda *arguments: fill(*arguments) or broken())
    host, hold = bench.filled_host(bench.content(0)), simulated.hold(staging.memory)
    calls = {
        OUT: lambda: bench.engine.write_back(bench.slots(2), host),
        IN: lambda: bench.engine.load(host, bench.slots(2)),
    }
    with pytest.raises(RuntimeError, match="the bus is gone"):
        calls[direction]()
    slots.free(host)
    simulated.run_what_can()
    assert slots.alloc(bench.host_pool.size) is None
    bench.run_kernel(2, bench.content(1))
    hold.release()
    bench.finish()
    bench.engine.close()
    assert slots.available_size() == bench.host_pool.size


# How often copies are asked
# ---------------------------------------------------------------------------------------------


def test_slots_that_are_free_are_taken_without_asking_any_copy(simulated, monkeypatch):
    """Each question is a call of CUDA; of copies on one stream only the first that is not over is
    worth one."""
    bench = Bench(simulated, "mha", "page_first", None)
    asked, query = [], type(simulated.device.event()).query
    monkeypatch.setattr(
        type(simulated.device.event()), "query", lambda event: asked.append(event) or query(event)
    )
    taken = [bench.alloc() for _ in range(5)]
    hold = bench.hold_write_backs_into(taken[0])
    for host in taken:
        bench.engine.write_back(bench.slots(2), host)
        bench.engine.host_slots.free(host)
    assert bench.alloc() is not None
    assert not asked
    assert bench.engine.host_slots.available_size() == 0
    assert len(asked) == 1
    hold.release()
    bench.engine.streams[OUT].synchronize()
    assert bench.engine.host_slots.available_size() == 5 * PAGE_SIZE
