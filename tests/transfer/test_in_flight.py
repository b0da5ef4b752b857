"""Memory under copies in flight: it stays until they are over, whoever lets go of it and whatever
fails."""

from __future__ import annotations

import gc

import pytest
import torch
from transfer_bench import PAGE as PAGE_SIZE
from transfer_bench import PAGES, Bench

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import StreamFailedError
from hicache_storage.transfer.plan import WAYS
from hicache_storage.transfer.pool_copies import IN, OUT


def held_copy(bench, direction=OUT):
    """A copy that nothing but a wait lets go on; what tells that it is over."""
    bench.place.hold()
    if direction == OUT:
        copy = bench.write_back(bench.slots(2), bench.alloc())
    else:
        copy = bench.load(bench.filled_host(bench.content(0)), bench.slots(2))
    assert not copy.done()
    return copy


@pytest.mark.parametrize("direction", [OUT, IN])
def test_closing_waits_for_copies_and_takes_no_more(simulated, direction):
    bench = Bench(simulated, "mha", "page_first", None)
    with bench.engine as engine:
        copy = held_copy(bench, direction)
    assert copy.done()
    engine.close()
    for call in (bench.write_back, bench.load):
        with pytest.raises(InvalidTransferError, match="closed"):
            call(bench.slots(0), bench.slots(0))


@pytest.mark.parametrize("way", WAYS)
def test_whoever_drops_the_pools_waits_for_their_copies(simulated, way):
    bench = Bench(simulated, "mha", "page_first", way)
    acknowledgement = held_copy(bench)
    del bench
    gc.collect()
    assert acknowledgement.done()


def test_a_failed_copy_is_told_when_it_is_closed(simulated):
    bench = Bench(simulated, "mha", "page_first", None)
    bench.engine.streams[OUT].copy(torch.zeros(2), torch.zeros(3), "copy that fails")
    with pytest.raises(StreamFailedError, match="must match"):
        bench.engine.close()
    bench.engine.close()


# What fails
# ---------------------------------------------------------------------------------------------------------------


def broken(*arguments):
    raise RuntimeError("the bus is gone")


def failing(bench, monkeypatch):
    """Copies are enqueued, and then something fails; what the host pages are that they use."""
    *_, lane = bench.pool.lanes[OUT]
    enqueue = lane.enqueue

    def fail(run):
        enqueue(run)
        raise RuntimeError("a later copy is refused")

    monkeypatch.setattr(lane, "enqueue", fail)
    bench.place.hold()
    return bench.alloc()


def fail_write_back(bench, host):
    with pytest.raises(RuntimeError, match="a later copy is refused"):
        bench.write_back(bench.slots(2), host)
    bench.host_slots.free(host)
    return bench.host_slots.available_size() == bench.host_pool.size


def test_host_pages_stay_until_what_was_enqueued_before_a_failure_is_over(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = failing(bench, monkeypatch)
    assert not fail_write_back(bench, host)
    bench.engine.streams[OUT].synchronize()
    assert bench.host_slots.available_size() == bench.host_pool.size


def test_pages_of_a_stream_that_tells_nothing_are_not_handed_out_again(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = failing(bench, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.streams[OUT], "record", broken)
        assert not fail_write_back(bench, host)
    bench.engine.synchronize()
    assert bench.alloc(PAGES) is None


def test_a_load_that_fails_holds_its_pages_too(simulated, monkeypatch):
    bench = Bench(simulated, "mha", "page_first", None)
    host = bench.filled_host(bench.content(0))
    *_, lane = bench.pool.lanes[IN]
    enqueue = lane.enqueue
    monkeypatch.setattr(lane, "enqueue", lambda run: broken() if run.layers.start else enqueue(run))
    simulated.hold()
    with pytest.raises(RuntimeError, match="the bus is gone"):
        bench.load(host, bench.slots(2))
    bench.host_slots.free(host)
    assert bench.alloc(PAGES) is None
    bench.engine.streams[IN].synchronize()
    assert bench.alloc(PAGES) is not None


@pytest.mark.parametrize("direction", [OUT, IN])
def test_a_staging_buffer_whose_filling_fails_is_waited_for(simulated, monkeypatch, direction):
    """Some of its copies were enqueued on a stream of their own: pages are kept for them, too."""
    bench = Bench(simulated, "mha", "page_first_direct", "dma")
    staging, slots = bench.staging(direction), bench.host_slots
    step = "copy_rows" if direction == OUT else "copy_pieces"
    fill = getattr(staging.filler, step)
    monkeypatch.setattr(staging.filler, step, lambda *arguments: fill(*arguments) or broken())
    host = bench.filled_host(bench.content(0))
    simulated.hold()
    calls = {
        OUT: lambda: bench.write_back(bench.slots(2), host),
        IN: lambda: bench.load(host, bench.slots(2)),
    }
    with pytest.raises(RuntimeError, match="the bus is gone"):
        calls[direction]()
    slots.free(host)
    assert slots.alloc(bench.host_pool.size) is None
    bench.run_kernel(2, bench.content(1))
    bench.finish()
    bench.engine.close()
    assert slots.available_size() == bench.host_pool.size


# How often copies are asked
# ---------------------------------------------------------------------------------------------


def test_slots_that_are_free_are_taken_without_asking_any_copy(simulated, monkeypatch):
    """Each question is a call of CUDA."""
    bench = Bench(simulated, "mha", "page_first", None)
    asked, event = [], type(bench.compute.record())
    query = event.query
    monkeypatch.setattr(event, "query", lambda event: asked.append(event) or query(event))
    taken = [bench.alloc() for _ in range(5)]
    simulated.hold()
    for host in taken:
        bench.write_back(bench.slots(2), host)
        bench.host_slots.free(host)
    assert bench.alloc() is not None
    assert not asked
    assert bench.host_slots.available_size() == 0
    bench.engine.streams[OUT].synchronize()
    assert bench.host_slots.available_size() == 5 * PAGE_SIZE
