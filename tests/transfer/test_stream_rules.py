"""ST-1 to ST-3 between any two pools, by the kernel and by DMA: on the simulator, and on a GPU with
kernels that wait for the host.

Each program moves pages so that exactly one event keeps a rule; `MUTANTS` leave out that event, and
are found.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_storage.transfer import Acknowledgement, LayerCounter
from hicache_storage.transfer.copies import DEVICE, HOST, IN, OUT
from hicache_storage.transfer.plan import WAYS
from tests.transfer.rig import PAGES, POOLS, Rig, same

GUIDE = Path(__file__).parents[2] / "docs" / "device-copies.md"

# Programs
# -------------------------------------------------------------------------------------------------


def write_back_behind_kernels(rig):
    """Kernels write three pages, which are copied out at once: more than the staging buffers
    take."""
    write_back_pages(rig, range(3), at_once=False)


def overwrite_behind_write_back(rig):
    """Kernels overwrite a page whose copy out has just begun."""
    old, new, host = rig.content(0), rig.content(1), rig.alloc()
    acknowledgement = begun_write_back(rig, old, host)
    rig.run_kernel(2, new, at_once=True)
    seen = rig.read(2)
    rig.wait(acknowledgement)
    assert same(rig.host_content(host), old)
    rig.finish()
    assert same(seen, new)


def begun_write_back(rig, content, host):
    """Page 2, which kernels wrote long ago."""
    rig.run_kernel(2, content, at_once=True)
    rig.compute.synchronize()
    rig.place.delay(rig.engine.streams[OUT])
    return rig.write_back(rig.slots(2), host)


def overwrite_behind_load(rig):
    """Kernels overwrite a page that is being loaded."""
    host, new = rig.filled_host(rig.content(0)), rig.content(1)
    rig.place.delay(rig.engine.streams[IN])
    rig.load(host, rig.slots(2))
    rig.run_kernel(2, new, at_once=True)
    rig.place.release()
    rig.engine.streams[IN].synchronize()
    seen = rig.read(2)
    rig.finish()
    assert same(seen, new)


def load_behind_kernels(rig):
    """A page is loaded while kernels still read it."""
    old, new = rig.content(0), rig.content(1)
    host = rig.filled_host(new)
    rig.run_kernel(2, old)
    rig.place.delay(rig.compute)
    seen = rig.read(2)
    seen_next = rig.read(2, rig.load(host, rig.slots(2)))
    rig.finish()
    assert same(seen, old)
    assert same(seen_next, new)


def load_behind_write_back(rig):
    """A page is loaded into a page whose copy out has just begun."""
    old, new = rig.content(0), rig.content(1)
    source, out = rig.filled_host(new), rig.alloc()
    acknowledgement = begun_write_back(rig, old, out)
    seen = rig.read(2, rig.load(source, rig.slots(2)))
    rig.wait(acknowledgement)
    assert same(rig.host_content(out), old)
    rig.finish()
    assert same(seen, new)


def write_back_behind_load(rig):
    """A page is copied out while it is being loaded."""
    content = rig.content(0)
    source, out = rig.filled_host(content), rig.alloc()
    rig.place.delay(rig.engine.streams[IN])
    rig.load(source, rig.slots(2))
    rig.wait(rig.write_back(rig.slots(2), out))
    assert same(rig.host_content(out), content)
    rig.finish()


def load_in_write_back(rig):
    """A host page is loaded elsewhere before its write-back is acknowledged."""
    content, host = rig.content(0), rig.alloc()
    begun_write_back(rig, content, host)
    seen = rig.read(4, rig.load(host, rig.slots(4)))
    rig.finish()
    assert same(seen, content)


def write_back_over(rig):
    """A host page is written back to while it is being loaded elsewhere."""
    old, new = rig.content(0), rig.content(1)
    host = rig.filled_host(old)
    rig.run_kernel(2, new, at_once=True)
    rig.compute.synchronize()
    rig.place.delay(rig.engine.streams[IN])
    counter = rig.load(host, rig.slots(4))
    acknowledgement = rig.write_back(rig.slots(2), host)
    seen = rig.read(4, counter)
    rig.wait(acknowledgement)
    assert same(rig.host_content(host), new)
    rig.finish()
    assert same(seen, old)


def layers_behind_their_events(rig, seeds=range(3)):
    """Kernels read each layer of three pages behind its own event."""
    contents, pages = [rig.content(seed) for seed in seeds], (5, 0, 3)
    host = rig.filled_host(*contents)
    counter = rig.load(host, rig.slots(*pages))
    seen = rig.read_pages(pages, counter)
    rig.free(host)
    rig.finish()
    assert all(map(same, seen, contents))
    assert counter.done()


def write_back_pages(rig, seeds, *, at_once=True):
    """Copy out three pages: that have been there for a while, or whose kernels are still to run."""
    contents, pages = [rig.content(seed) for seed in seeds], (4, 0, 3)
    host = rig.alloc(3)
    for page, content in zip(pages, contents, strict=True):
        rig.run_kernel(page, content, at_once=at_once)
    if at_once:
        rig.compute.synchronize()
    rig.wait(rig.write_back(rig.slots(*pages), host))
    for number, content in enumerate(contents):
        assert same(rig.host_content(host, number), content)
    rig.free(host)
    rig.finish()


def staged(move, delay):
    """Staging buffers are used again, and what fills or drains them takes its time."""

    def program(rig):
        move(rig, range(3))
        delay(rig)
        move(rig, range(3, 6))

    return program


def filling(direction):
    return lambda rig: rig.place.delay(rig.staging(direction).filler)


def draining(direction):
    return lambda rig: rig.delay_draining(direction)


def host_pages_of_a_load_stay(rig):
    """A host page is freed while it is loaded: it is not handed out before it has been read."""
    content = rig.content(0)
    host = rig.filled_host(content)
    freed_pages_stay(rig, host, IN)
    seen = rig.read(2)
    rig.finish()
    assert same(seen, content)


def host_pages_of_a_write_back_stay(rig):
    """A backup is given up while it is copied: what is put into host pages meanwhile stays
    whole."""
    host = rig.alloc()
    rig.run_kernel(2, rig.content(0))
    freed_pages_stay(rig, host, OUT)
    rig.finish()


def freed_pages_stay(rig, host, direction):
    """A copy of page 2 runs while its host page is freed and all others are taken."""
    rig.place.delay(rig.engine.streams[direction])
    rig.place.hold()
    page = rig.slots(2)
    copy = rig.write_back(page, host) if direction == OUT else rig.load(host, page)
    rig.free(host)
    handed = rig.alloc(PAGES - 1)
    extra = [slots.alloc(rig.page_sizes[name]) for name, slots in rig.host_slots.items()]
    rig.place.release()
    assert extra == [None] * len(extra), "a host page was handed out while a copy used it"
    rig.free(handed)
    copy.synchronize()
    assert rig.free_pages() == PAGES


ANY = [
    write_back_behind_kernels,
    overwrite_behind_write_back,
    overwrite_behind_load,
    load_behind_kernels,
    load_behind_write_back,
    write_back_behind_load,
    load_in_write_back,
    write_back_over,
    layers_behind_their_events,
    host_pages_of_a_load_stay,
    host_pages_of_a_write_back_stay,
]
STAGED_OUT = [staged(write_back_pages, slow(OUT)) for slow in (filling, draining)]
STAGED_IN = [staged(layers_behind_their_events, slow(IN)) for slow in (filling, draining)]
PROGRAMS = [(program, way, *pool) for program in ANY for way in WAYS for pool in POOLS]
PROGRAMS += [(each, "dma", "mha", "page_first_direct") for each in STAGED_OUT + STAGED_IN]


def named(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("program", "way", "model", "layout"), PROGRAMS, ids=named)
def test_every_event_is_there(place, program, way, model, layout):
    program(Rig(place, model, layout, way))


# Mutants
# -------------------------------------------------------------------------------------------------


def without_compute(direction):
    """Copies of one direction do not wait for the kernels launched so far."""

    def break_it(rig):
        wait = rig.engine.behind_compute
        rig.engine.behind_compute = lambda way: None if way == direction else wait(way)

    return break_it


def unfenced(direction, step, side):
    """The fences of a direction's copies leave out the pages of one side: they are not noted, or
    the other direction does not wait."""

    def break_it(rig):
        fences = rig.pool.fences[direction]
        note, wait = fences.note, fences.wait

        def note_others(*arguments):
            note(*arguments)
            fences.last[side] = 0

        def wait_for_others(stream, pages):
            last = fences.last.copy()
            fences.last[side] *= stream is rig.compute
            wait(stream, pages)
            fences.last = last

        setattr(fences, step, {"note": note_others, "wait": wait_for_others}[step])

    return break_it


def unheld(direction):
    """The allocator of host pages does not look at one direction's copies."""

    def break_it(rig):
        rig.pool.host_slots.fences = [rig.pool.fences[IN if direction == OUT else OUT]]

    return break_it


def unstaged(direction, step):
    """The staging buffers of a direction leave out a wait."""
    return lambda rig: setattr(rig.staging(direction), step, lambda *arguments: None)


def acknowledged_early(rig):
    write_back = rig.engine.write_back

    def too_early(*arguments):
        begun = rig.engine.streams[OUT].record()
        rig.place.delay(rig.engine.streams[OUT])
        write_back(*arguments)
        return Acknowledgement([begun])

    rig.engine.write_back = too_early


def signalled_early(layers):
    """Layers are signalled when those before them have come, by so many, or none."""

    def break_it(rig):
        load = rig.engine.load

        def too_early(*arguments):
            begun = [rig.engine.streams[IN].record()] * layers
            rig.place.delay(rig.engine.streams[IN])
            return LayerCounter([*begun, *load(*arguments).events][: rig.layer_num])

        rig.engine.load = too_early

    return break_it


def without_overwrite_fence(rig):
    rig.engine.before_overwrite = lambda pages: None


UNFENCED = [
    ("loads do not wait for write-backs", OUT, "wait", DEVICE, load_behind_write_back),
    ("write-backs do not wait for loads", IN, "wait", DEVICE, write_back_behind_load),
    ("device pages in write-back are not noted", OUT, "note", DEVICE, load_behind_write_back),
    ("device pages in load are not noted", IN, "note", DEVICE, write_back_behind_load),
    ("loads do not wait for their host pages", OUT, "wait", HOST, load_in_write_back),
    ("write-backs do not wait for their host pages", IN, "wait", HOST, write_back_over),
    ("host pages in write-back are not noted", OUT, "note", HOST, load_in_write_back),
    ("host pages in load are not noted", IN, "note", HOST, write_back_over),
]
UNSTAGED = [
    ("gathering does not wait for kernels", OUT, "before_staging", write_back_behind_kernels),
    ("staging does not wait for host pages", IN, "before_staging", load_in_write_back),
    ("gathering overruns a buffer", OUT, "before_refill", STAGED_OUT[1]),
    ("copies leave before they are gathered", OUT, "hand_over", STAGED_OUT[0]),
    ("staging overruns a buffer", IN, "before_refill", STAGED_IN[1]),
    ("scattering begins before pages have come", IN, "hand_over", STAGED_IN[0]),
]
MUTANTS = {
    "write-backs do not wait for kernels": (without_compute(OUT), write_back_behind_kernels),
    "loads do not wait for kernels": (without_compute(IN), load_behind_kernels),
    "a write-back is acknowledged when it begins": (acknowledged_early, write_back_behind_kernels),
    "layers are signalled before their copy": (signalled_early(9), layers_behind_their_events),
    "kernels do not wait for write-backs": (without_overwrite_fence, overwrite_behind_write_back),
    "kernels do not wait for loads": (without_overwrite_fence, overwrite_behind_load),
    "host pages in load are not held": (unheld(IN), host_pages_of_a_load_stay),
    "host pages in write-back are not held": (unheld(OUT), host_pages_of_a_write_back_stay),
    **{name: (unfenced(*event), program) for name, *event, program in UNFENCED},
}
STAGING_MUTANTS = {name: (unstaged(*event), program) for name, *event, program in UNSTAGED}
BROKEN = [
    (name, *mutant, way, layout)
    for name, mutant in MUTANTS.items()
    for way in WAYS
    for layout in ("layer_first", "page_first_direct")
] + [(name, *mutant, "dma", "page_first_direct") for name, mutant in STAGING_MUTANTS.items()]


@pytest.mark.parametrize(
    ("break_it", "program", "way", "layout"),
    [pytest.param(*broken, id="-".join([name, *broken[2:]])) for name, *broken in BROKEN],
)
def test_a_missing_event_is_found(place, break_it, program, way, layout):
    rig = Rig(place, "mha", layout, way)
    break_it(rig)
    with pytest.raises(AssertionError):
        program(rig)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_signalled_early_is_found(simulated, way):
    rig = Rig(simulated, "mha", "page_first_direct", way)
    signalled_early(1)(rig)
    with pytest.raises(AssertionError, match=r"memory that .*'load of layer"):
        layers_behind_their_events(rig)


def test_the_guide_lists_the_mutant_of_every_event():
    rows = re.findall(r"^\|.*\| ST-[123] \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    listed = [mutant for row in rows for mutant in row.split(", ")]
    assert sorted(listed) == sorted({**MUTANTS, **STAGING_MUTANTS})


# Several pools
# -------------------------------------------------------------------------------------------------


def overwrite_one_pool(rig, name):
    """Pages of all pools go out and come in; of one pool, kernels overwrite them at once."""
    for page, copy in ((4, rig.write_back), (2, lambda device, host: rig.load(host, device))):
        copy(rig.slots(page), rig.slots(1))
        rig.run_kernel(page, rig.content(page), pools=[name])
    rig.finish()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", [OUT, IN])
@pytest.mark.parametrize("name", ["kv", "mamba"])
def test_the_events_of_each_pool_are_missed(simulated, name, direction, way):
    overwrite_one_pool(Rig(simulated, "hybrid", "page_first", way), name)
    broken = Rig(simulated, "hybrid", "page_first", way)
    broken.engine.pools[name].fences[direction].note = lambda *arguments: None
    with pytest.raises(AssertionError):
        overwrite_one_pool(broken, name)


# Layers
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "layout"), POOLS)
@pytest.mark.parametrize("way", WAYS)
def test_layers_do_not_wait_for_later_ones(simulated, way, model, layout):
    """In the order of the model, whichever pool has them."""
    rig = Rig(simulated, model, layout, way)
    content = rig.content(0)
    host = rig.filled_host(content)
    simulated.hold()
    counter = rig.load(host, rig.slots(2))
    seen = []
    for layer in range(rig.layer_num - 1):
        counter.wait(layer, rig.compute)
        seen.append(rig.read_layer(2, layer))
    rig.compute.synchronize()
    assert not counter.done(), "kernels of earlier layers waited for the last one"
    simulated.check()
    assert same(seen, content[:-1])
    counter.synchronize()
    assert counter.done()
