"""ST-1 to ST-3 between any two pools, by the kernel and by DMA: on the simulator, and on a GPU with
kernels that wait for the host.

Each program moves pages so that exactly one event keeps a rule; `MUTANTS` leave out that event, and
are found.
"""

from __future__ import annotations

import pytest
from transfer_bench import LAYERS, POOLS, Bench, same

from hicache_storage.transfer import Acknowledgement, LayerCounter
from hicache_storage.transfer.copies import DEVICE, HOST
from hicache_storage.transfer.plan import WAYS
from hicache_storage.transfer.pool_copies import IN, OUT

# Programs
# -------------------------------------------------------------------------------------------------------------


def write_back_behind_kernels(bench):
    """Kernels write three pages, which are copied out at once: more than the staging buffers
    take."""
    write_back_pages(bench, range(3), at_once=False)


def overwrite_behind_write_back(bench):
    """Kernels overwrite a page whose copy out has just begun."""
    old, new, host = (
        bench.content(0),
        bench.content(1),
        bench.alloc(),
    )
    bench.run_kernel(2, old)
    bench.compute.synchronize()
    bench.place.delay(bench.engine.streams[OUT])
    acknowledgement = bench.write_back(bench.slots(2), host)
    bench.run_kernel(2, new, at_once=True)
    seen = bench.read(2)
    bench.wait(acknowledgement)
    assert same(bench.host_content(host), old)
    bench.finish()
    assert same(seen, new)


def overwrite_behind_load(bench):
    """Kernels overwrite a page that is being loaded."""
    host, new = bench.filled_host(bench.content(0)), bench.content(1)
    bench.place.delay(bench.engine.streams[IN])
    bench.load(host, bench.slots(2))
    bench.run_kernel(2, new, at_once=True)
    bench.place.release()
    bench.engine.streams[IN].synchronize()
    seen = bench.read(2)
    bench.finish()
    assert same(seen, new)


def load_behind_kernels(bench):
    """A page is loaded while kernels still read it."""
    old, new = bench.content(0), bench.content(1)
    host = bench.filled_host(new)
    bench.run_kernel(2, old)
    bench.place.delay(bench.compute)
    seen = bench.read(2)
    seen_next = bench.read(2, bench.load(host, bench.slots(2)))
    bench.finish()
    assert same(seen, old)
    assert same(seen_next, new)


def load_behind_write_back(bench):
    """A page is loaded into a page whose copy out has just begun."""
    old, new = bench.content(0), bench.content(1)
    source, out = bench.filled_host(new), bench.alloc()
    bench.run_kernel(2, old)
    bench.compute.synchronize()
    bench.place.delay(bench.engine.streams[OUT])
    acknowledgement = bench.write_back(bench.slots(2), out)
    seen = bench.read(2, bench.load(source, bench.slots(2)))
    bench.wait(acknowledgement)
    assert same(bench.host_content(out), old)
    bench.finish()
    assert same(seen, new)


def write_back_behind_load(bench):
    """A page is copied out while it is being loaded."""
    content = bench.content(0)
    source, out = bench.filled_host(content), bench.alloc()
    bench.place.delay(bench.engine.streams[IN])
    bench.load(source, bench.slots(2))
    bench.wait(bench.write_back(bench.slots(2), out))
    assert same(bench.host_content(out), content)
    bench.finish()


def load_in_write_back(bench):
    """A host page is loaded elsewhere before its write-back is acknowledged."""
    content, host = bench.content(0), bench.alloc()
    bench.run_kernel(2, content)
    bench.compute.synchronize()
    bench.place.delay(bench.engine.streams[OUT])
    bench.write_back(bench.slots(2), host)
    seen = bench.read(4, bench.load(host, bench.slots(4)))
    bench.finish()
    assert same(seen, content)


def write_back_over(bench):
    """A host page is written back to while it is being loaded elsewhere."""
    old, new = bench.content(0), bench.content(1)
    host = bench.filled_host(old)
    bench.run_kernel(2, new)
    bench.compute.synchronize()
    bench.place.delay(bench.engine.streams[IN])
    counter = bench.load(host, bench.slots(4))
    acknowledgement = bench.write_back(bench.slots(2), host)
    seen = bench.read(4, counter)
    bench.wait(acknowledgement)
    assert same(bench.host_content(host), new)
    bench.finish()
    assert same(seen, old)


def layers_behind_their_events(bench, seeds=range(3)):
    """Kernels read each layer of three pages behind its own event."""
    contents, pages = [bench.content(seed) for seed in seeds], (5, 0, 3)
    host = bench.filled_host(*contents)
    counter = bench.load(host, bench.slots(*pages))
    seen = bench.read_pages(pages, counter)
    bench.host_slots.free(host)
    bench.finish()
    assert all(map(same, seen, contents))
    assert counter.done()


def write_back_pages(bench, seeds, *, at_once=True):
    """Copy out three pages: that have been there for a while, or whose kernels are still to run."""
    contents, pages = [bench.content(seed) for seed in seeds], (4, 0, 3)
    host = bench.alloc(3)
    for page, content in zip(pages, contents, strict=True):
        bench.run_kernel(page, content, at_once=at_once)
    if at_once:
        bench.compute.synchronize()
    bench.wait(bench.write_back(bench.slots(*pages), host))
    for number, content in enumerate(contents):
        assert same(
            bench.host_content(host[number * bench.kind.page_size :]),
            content,
        )
    bench.host_slots.free(host)
    bench.finish()


def staged_out_behind_slow_kernels(bench):
    """Staging buffers are used again, and gathering takes its time."""
    write_back_pages(bench, range(3))
    bench.place.delay(bench.staging(OUT).filler)
    write_back_pages(bench, range(3, 6))


def staged_out_behind_a_slow_bus(bench):
    """Staging buffers are used again, and copies to the host take their time."""
    write_back_pages(bench, range(3))
    bench.delay_draining(OUT)
    write_back_pages(bench, range(3, 6))


def staged_in_behind_a_slow_bus(bench):
    """Staging buffers are used again, and copies from the host take their time."""
    layers_behind_their_events(bench)
    bench.place.delay(bench.staging(IN).filler)
    layers_behind_their_events(bench, range(3, 6))


def staged_in_behind_slow_kernels(bench):
    """Staging buffers are used again, and scattering takes its time."""
    layers_behind_their_events(bench)
    bench.delay_draining(IN)
    layers_behind_their_events(bench, range(3, 6))


def host_pages_of_a_load_stay(bench):
    """A host page is freed while it is loaded: it is not handed out before it has been read."""
    content = bench.content(0)
    host = bench.filled_host(content)
    bench.place.delay(bench.engine.streams[IN])
    bench.place.hold()
    counter = bench.load(host, bench.slots(2))
    _freed_pages_stay(bench, host)
    seen = bench.read(2, counter)
    bench.finish()
    assert same(seen, content)
    assert bench.host_slots.available_size() == bench.host_pool.size


def host_pages_of_a_write_back_stay(bench):
    """A backup is given up while it is copied: what is put into host pages meanwhile stays
    whole."""
    host = bench.alloc()
    bench.run_kernel(2, bench.content(0))
    bench.place.delay(bench.engine.streams[OUT])
    bench.place.hold()
    acknowledgement = bench.write_back(bench.slots(2), host)
    _freed_pages_stay(bench, host)
    bench.wait(acknowledgement)
    bench.finish()
    assert bench.host_slots.available_size() == bench.host_pool.size


def _freed_pages_stay(bench, host):
    slots = bench.host_slots
    slots.free(host)
    handed = slots.alloc(bench.host_pool.size - host.numel())
    extra = slots.alloc(host.numel())
    bench.place.release()
    assert extra is None, "a host page was handed out while a copy used it"
    slots.free(handed)


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
WITH_STAGING = [
    staged_out_behind_slow_kernels,
    staged_out_behind_a_slow_bus,
    staged_in_behind_a_slow_bus,
    staged_in_behind_slow_kernels,
]
PROGRAMS = [
    (program, way, kind, layout) for program in ANY for way in WAYS for kind, layout in POOLS
] + [(program, "dma", "mha", "page_first_direct") for program in WITH_STAGING]


def named(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("program", "way", "kind", "layout"), PROGRAMS, ids=named)
def test_every_event_is_there(bench, program, way, kind, layout):
    program(bench(kind, layout, way))


# Mutants
# --------------------------------------------------------------------------------------------------------------


def without_compute(direction):
    """Copies of one direction do not wait for the kernels launched so far."""

    def break_it(bench):
        wait = bench.engine._behind_compute
        bench.engine._behind_compute = lambda way: None if way == direction else wait(way)

    return break_it


def unfenced(direction, step, side):
    """The fences of a direction's copies leave out the pages of one side: they are not noted, or
    the other direction does not wait."""

    def break_it(bench):
        fences = bench.pool._fences[direction]
        note, wait = fences.note, fences.wait

        def note_others(*arguments):
            note(*arguments)
            fences._last[side] = 0

        def wait_for_others(stream, pages):
            last = fences._last.clone()
            fences._last[side] *= stream is bench.compute
            wait(stream, pages)
            fences._last = last

        setattr(fences, step, {"note": note_others, "wait": wait_for_others}[step])

    return break_it


def unheld(direction):
    """The allocator of host pages does not look at one direction's copies."""

    def break_it(bench):
        bench.host_slots._fences = [bench.pool._fences[IN if direction == OUT else OUT]]

    return break_it


def unstaged(direction, step):
    """The staging buffers of a direction leave out a wait."""
    return lambda bench: setattr(bench.staging(direction), step, lambda *arguments: None)


def acknowledged_early(bench):
    write_back = bench.engine.write_back

    def too_early(*arguments):
        begun = bench.engine.streams[OUT].record()
        bench.place.delay(bench.engine.streams[OUT])
        write_back(*arguments)
        return Acknowledgement([begun])

    bench.engine.write_back = too_early


def signalled_one_layer_early(bench):
    load = bench.engine.load

    def too_early(*arguments):
        begun = bench.engine.streams[IN].record()
        return LayerCounter([begun, *load(*arguments)._events[:-1]])

    bench.engine.load = too_early


def signalled_when_begun(bench):
    load = bench.engine.load

    def too_early(*arguments):
        begun = bench.engine.streams[IN].record()
        bench.place.delay(bench.engine.streams[IN])
        return LayerCounter([begun] * len(load(*arguments)._events))

    bench.engine.load = too_early


def without_overwrite_fence(bench):
    bench.engine.before_overwrite = lambda pages: None


MUTANTS = {
    "write-backs do not wait for kernels": (without_compute(OUT), write_back_behind_kernels),
    "loads do not wait for kernels": (without_compute(IN), load_behind_kernels),
    "a write-back is acknowledged when it begins": (acknowledged_early, write_back_behind_kernels),
    "layers are signalled before their copy": (signalled_when_begun, layers_behind_their_events),
    "kernels do not wait for write-backs": (without_overwrite_fence, overwrite_behind_write_back),
    "kernels do not wait for loads": (without_overwrite_fence, overwrite_behind_load),
    "host pages in load are not held": (unheld(IN), host_pages_of_a_load_stay),
    "host pages in write-back are not held": (unheld(OUT), host_pages_of_a_write_back_stay),
    "loads do not wait for write-backs": (unfenced(OUT, "wait", DEVICE), load_behind_write_back),
    "write-backs do not wait for loads": (unfenced(IN, "wait", DEVICE), write_back_behind_load),
    "device pages in write-back are not noted": (
        unfenced(OUT, "note", DEVICE),
        load_behind_write_back,
    ),
    "device pages in load are not noted": (unfenced(IN, "note", DEVICE), write_back_behind_load),
    "loads do not wait for their host pages": (unfenced(OUT, "wait", HOST), load_in_write_back),
    "write-backs do not wait for their host pages": (unfenced(IN, "wait", HOST), write_back_over),
    "host pages in write-back are not noted": (unfenced(OUT, "note", HOST), load_in_write_back),
    "host pages in load are not noted": (unfenced(IN, "note", HOST), write_back_over),
}
STAGING_MUTANTS = {
    name: (unstaged(direction, step), program)
    for name, direction, step, program in [
        ("gathering does not wait for kernels", OUT, "_before_staging", write_back_behind_kernels),
        ("staging does not wait for host pages", IN, "_before_staging", load_in_write_back),
        ("gathering overruns a buffer", OUT, "_before_fill", staged_out_behind_a_slow_bus),
        (
            "copies leave before they are gathered",
            OUT,
            "_hand_over",
            staged_out_behind_slow_kernels,
        ),
        ("staging overruns a buffer", IN, "_before_fill", staged_in_behind_slow_kernels),
        ("scattering begins before pages have come", IN, "_hand_over", staged_in_behind_a_slow_bus),
    ]
}
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
def test_a_missing_event_is_found(bench, break_it, program, way, layout):
    made = bench("mha", layout, way)
    break_it(made)
    with pytest.raises(AssertionError):
        program(made)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_signalled_early_is_found(simulated, way):
    made = Bench(simulated, "mha", "page_first_direct", way)
    signalled_one_layer_early(made)
    with pytest.raises(AssertionError, match=r"memory that .*'load of layer"):
        layers_behind_their_events(made)


# Layers
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize("way", WAYS)
def test_layers_do_not_wait_for_later_ones(simulated, way, kind, layout):
    made = Bench(simulated, kind, layout, way)
    content = made.content(0)
    host = made.filled_host(content)
    simulated.hold()
    counter = made.load(host, made.slots(2))
    seen = []
    for layer in range(LAYERS - 1):
        counter.wait(layer, made.compute)
        seen.append(made.read_layer(2, layer))
    made.compute.synchronize()
    assert not counter.done(), "kernels of earlier layers waited for the last one"
    simulated.check()
    assert same(seen, content[:-1])
    counter.synchronize()
    assert counter.done()
