"""Memory under copies in flight: it stays until they are over, whoever lets go of it and whatever
fails."""

from __future__ import annotations

import gc

import pytest
import torch

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import StreamFailedError
from hicache_storage.transfer.copies import IN, OUT
from hicache_storage.transfer.plan import WAYS
from tests.transfer.rig import PAGES, Rig

DIRECTION = pytest.mark.parametrize("direction", [OUT, IN])


def copy(rig, direction, host):
    """A copy of page 2 to or from the host."""
    page = rig.slots(2)
    return rig.write_back(page, host) if direction == OUT else rig.load(host, page)


def held_copy(rig, direction=OUT):
    """A copy that nothing but a wait lets go on."""
    host = rig.filled_host(rig.content(0))
    rig.place.hold()
    held = copy(rig, direction, host)
    assert not held.done()
    return held


@DIRECTION
def test_closing_waits_for_copies_and_takes_no_more(simulated, direction):
    rig = Rig(simulated, "mha", "page_first", None)
    held = held_copy(rig, direction)
    rig.engine.close()
    assert held.done()
    rig.engine.close()
    for call in (OUT, IN):
        with pytest.raises(InvalidTransferError, match="closed"):
            copy(rig, call, rig.slots(0))


@pytest.mark.parametrize("way", WAYS)
def test_whoever_drops_the_pools_waits_for_their_copies(simulated, way):
    rig = Rig(simulated, "mha", "page_first", way)
    acknowledgement = held_copy(rig)
    del rig
    gc.collect()
    assert acknowledgement.done()


def test_a_failed_copy_is_told_when_it_is_closed(simulated):
    rig = Rig(simulated, "mha", "page_first", None)
    rig.engine.streams[OUT].copy(torch.zeros(2), torch.zeros(3), "copy that fails")
    with pytest.raises(StreamFailedError, match="must match"):
        rig.engine.close()
    rig.engine.close()


# What fails
# ---------------------------------------------------------------------------------------------


def broken(*arguments):
    raise RuntimeError("the bus is gone")


def failing_second_pool(rig, monkeypatch, direction):
    """Another pool's copies cannot be enqueued."""
    monkeypatch.setattr(rig.engine.pools["mamba"], "begin", broken)


def failing_lane(rig, monkeypatch, direction):
    """The last copies fail half-way: of a load those of a later layer."""
    *_, lane = rig.pool.lanes[direction]
    enqueue = lane.enqueue

    def fail(run):
        enqueue(run)
        if direction == OUT or run.layers.start:
            broken()

    monkeypatch.setattr(lane, "enqueue", fail)


def failing_staging(rig, monkeypatch, direction):
    """What fills a staging buffer, on a stream of its own, fails half-way."""
    filler = rig.staging(direction).filler
    step = "copy_rows" if direction == OUT else "copy_pieces"
    fill = getattr(filler, step)
    monkeypatch.setattr(filler, step, lambda *arguments: fill(*arguments) or broken())


@pytest.mark.parametrize(
    ("fail", "model", "layout", "way"),
    [
        (failing_second_pool, "hybrid", "page_first", "kernel"),
        (failing_second_pool, "hybrid", "page_first", "dma"),
        (failing_lane, "mha", "page_first", None),
        (failing_staging, "mha", "page_first_direct", "dma"),
    ],
)
@DIRECTION
def test_pages_stay_until_what_was_enqueued_before_a_failure_is_over(
    simulated, monkeypatch, direction, fail, model, layout, way
):
    """Nobody overwrites or is handed the pages that these copies use."""
    rig = Rig(simulated, model, layout, way)
    host = rig.filled_host(rig.content(0))
    simulated.hold()
    with monkeypatch.context() as patch:
        fail(rig, patch, direction)
        with pytest.raises(RuntimeError, match="the bus is gone"):
            copy(rig, direction, host)
    first = min(host)
    rig.free(host)
    assert rig.host_slots[first].alloc(rig.host[first].size) is None
    rig.run_kernel(2, rig.content(1))
    rig.finish()
    rig.engine.close()
    assert rig.free_pages() == PAGES


def test_pages_of_a_stream_that_tells_nothing_are_not_handed_out_again(simulated, monkeypatch):
    rig = Rig(simulated, "mha", "page_first", None)
    host = rig.alloc()
    failing_lane(rig, monkeypatch, OUT)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.streams[OUT], "record", broken)
        with pytest.raises(RuntimeError, match="the bus is gone"):
            copy(rig, OUT, host)
        rig.free(host)
    rig.engine.close()
    assert rig.free_pages() == PAGES - 1
