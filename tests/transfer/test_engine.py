"""Copies of pages between device and host: every pool and layout, several pools, refused
arguments."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from random import Random

import pytest
import torch

from hicache_storage.pools import DevicePages
from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer import Indices, PageTransfers
from hicache_storage.transfer.copies import IN, OUT
from hicache_storage.transfer.plan import WAYS
from tests.transfer.rig import (
    PAGE,
    PAGES,
    POISON,
    POOLS,
    Rig,
    moved,
    one_pool,
    page_slots,
    pools_of,
    raw,
    same,
)


def nothing_was_enqueued(rig):
    return not any(stream.ran or stream.queue for stream in rig.engine.streams.values())


@pytest.mark.parametrize(("model", "layout"), POOLS)
@pytest.mark.parametrize(
    ("way", "staging_bytes"), [(None, 1), ("kernel", 1), ("dma", 1), ("dma", 1 << 20)]
)
def test_pages_come_back_as_they_went(place, model, layout, way, staging_bytes):
    rig = Rig(place, model, layout, way, staging_bytes=staging_bytes)
    contents, pages, elsewhere = [*map(rig.content, range(4))], (3, 1, 2, 5), (0, 5, 4, 2)
    for page, content in zip(pages, contents, strict=True):
        rig.run_kernel(page, content)
    host = rig.some(rig.alloc(4), (2, 3, 0, 1))
    acknowledgement = rig.write_back(rig.slots(*pages), host)
    for page in set(pages) - {1}:
        rig.run_kernel(page, rig.content(9))
    counter = rig.load(host, rig.slots(*elsewhere))
    seen = rig.read_pages(elsewhere, counter)
    untouched = rig.read(1)
    rig.wait(acknowledgement)
    rig.finish()
    assert counter.done()
    assert all(map(same, seen, contents))
    assert same(untouched, contents[1])
    rest = rig.alloc(2)
    for number in range(2):
        left = rig.host_content(rest, number)
        assert all(set(raw(part).tolist()) == {POISON} for parts in left for part in parts)


@pytest.mark.parametrize(("model", "layout"), POOLS)
@pytest.mark.parametrize("way", WAYS)
def test_random_traffic(simulated, way, model, layout):
    """Kernels, write-backs, loads and frees in random order on few pages. Nothing is waited for: by
    the order of the calls every page holds what it should, and no race is found."""
    random = Random(f"{way} {model} {layout}")
    rig = Rig(simulated, model, layout, way)
    contents = [rig.content(seed) for seed in range(PAGES)]
    on_device, backed_up, seen = {}, [], []

    def run_kernel(page):
        on_device[page] = random.choice(contents)
        rig.run_kernel(page, on_device[page])

    def write_back(pages):
        while (host := rig.alloc(len(pages))) is None:
            # Those that are free are still in use by copies, some of which run when they are asked.
            if backed_up:
                rig.free(backed_up.pop(0)[1])
        acknowledgement = rig.write_back(rig.slots(*pages), host)
        copied = [on_device[page] for page in pages]
        if random.random() < 0.3:
            rig.wait(acknowledgement)
            assert same(rig.host_content(host), copied[0])
        backed_up.append((copied, host))

    def load(pages):
        copied, host = random.choice(backed_up)
        # What is only read may occur twice.
        sources = [random.randrange(len(copied)) for _ in pages]
        counter = rig.load(rig.some(host, sources), rig.slots(*pages))
        on_device.update({page: copied[of] for page, of in zip(pages, sources, strict=True)})
        seen.extend(zip(rig.read_pages(pages, counter), map(on_device.get, pages), strict=True))

    for page in range(PAGES):
        run_kernel(page)
    for _ in range(12):
        pages = random.sample(range(PAGES), random.randint(1, PAGES - 2))
        match random.randrange(4):
            case 0:
                run_kernel(pages[0])
            case 1 if backed_up:
                load(pages)
            case 2 if backed_up:
                # It may be handed out only when the copies that use it are done.
                rig.free(backed_up.pop(random.randrange(len(backed_up)))[1])
            case _:
                write_back(pages)
        rig.place.check()
    seen += [(rig.read(page), content) for page, content in on_device.items()]
    rig.finish()
    assert all(same(found, content) for found, content in seen)


# Several pools
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_one_state_goes_to_two_slots(place, way):
    """A hit's state is copied to the slot of its node and to that of the request."""
    rig = Rig(place, "hybrid", "page_first", way)
    content = rig.content(0)
    host = rig.filled_host(content)
    kv = Indices(rig.slots(2)["kv"], host["kv"])
    state = Indices(rig.slots(2, 5)["mamba"], rig.some(host, (0, 0))["mamba"])
    first = rig.read(2, rig.engine.load({"kv": kv, "mamba": state}))
    second = rig.read(5, rig.engine.load({"kv": Indices(rig.slots(5)["kv"], host["kv"])}))
    rig.finish()
    assert same(first, content)
    assert same(second, content)


def test_pools_without_pages_are_left_out(simulated):
    rig = Rig(simulated, "hybrid", "page_first", None)
    content = rig.content(0)
    rig.run_kernel(4, content)
    states = {"mamba": Indices(rig.slots(4)["mamba"], rig.slots(1)["mamba"])}
    rig.engine.write_back(states).synchronize()
    states = {"mamba": Indices(rig.slots(2)["mamba"], rig.slots(1)["mamba"])}
    seen = rig.read(2, rig.engine.load(states))
    rig.finish()
    for layer in range(rig.layer_num):
        arrived = same([seen[layer]], [content[layer]])
        assert arrived == (layer in rig.layers["mamba"])


def test_nothing_is_enqueued_where_one_pool_refuses(simulated):
    rig = Rig(simulated, "hybrid", "page_first", None)
    good = Indices(rig.slots(0)["kv"], rig.slots(0)["kv"])
    bad = Indices(rig.slots(0)["mamba"], rig.slots(PAGES)["mamba"])
    for move in (rig.engine.write_back, rig.engine.load):
        with pytest.raises(InvalidTransferError, match="host_indices must be slots in"):
            move({"kv": good, "mamba": bad})
        with pytest.raises(InvalidTransferError, match="no such pool: swa; there are kv, mamba"):
            move({"kv": good, "swa": good})
    with pytest.raises(InvalidTransferError, match="no such pool: swa"):
        rig.engine.before_overwrite({"kv": good.device, "swa": good.device})
    assert nothing_was_enqueued(rig)
    with pytest.raises(InvalidPoolError, match="at least one pool"):
        PageTransfers(simulated.device, rig.compute, {})


# Refused
# -------------------------------------------------------------------------------------------------


def test_indices_that_do_not_fit_are_refused(simulated):
    rig = Rig(simulated, "mha", "page_first", None)

    def slots(*pages):
        return page_slots(pages, PAGE)

    for device, host, message in [
        (slots(0), slots(0, 1), "as many device_indices as host_indices, and not none: 2 and 4"),
        (slots(), slots(), "and not none: 0 and 0"),
        (slots(0, 1)[1:], slots(0, 1)[1:], "whole pages of 2"),
        (torch.arange(1, 5), slots(0, 1), "whole pages of 2"),
        (slots(0, PAGES), slots(0, 1), "device_indices must be slots in"),
        (slots(0, -1), slots(0, 1), "device_indices must be slots in"),
        (slots(0, 1), slots(0, PAGES), "host_indices must be slots in"),
        (slots(0, 1), slots(-1, 0), "host_indices must be slots in"),
    ]:
        for move in (rig.engine.write_back, rig.engine.load):
            with pytest.raises(InvalidTransferError, match=message):
                move(moved({"pool": device}, {"pool": host}))
    assert nothing_was_enqueued(rig)


def test_repeated_pages_are_found(simulated):
    """Only where they are written."""
    rig = Rig(simulated, "mha", "page_first", None)
    for pages in [*itertools.product(range(4), repeat=4), (0,) * (PAGES + 1)]:
        written, read = page_slots(pages, PAGE), page_slots([1] * len(pages), PAGE)
        for direction, side, indices in (
            (OUT, "host_indices", (read, written)),
            (IN, "device_indices", (written, read)),
        ):
            with (
                pytest.raises(InvalidTransferError, match=f"{side} hold a page twice")
                if len(set(pages)) < len(pages)
                else nullcontext()
            ):
                rig.pool.pages(direction, Indices(*indices))


def test_pools_that_do_not_fit_are_refused(simulated):
    device, host = pools_of("mha", "page_first")
    compute = simulated.device.stream("compute")
    rows = "element type and shape of the rows of layer 0 is"
    for layers, page_size, field in (
        (device.layers[1:], PAGE, "layer_num is 3 in the host pool and 2 in the device pages"),
        ([(v, k) for k, v in device.layers], PAGE, rows),
        ([(k.view(torch.int16), v) for k, v in device.layers], PAGE, rows),
        (device.layers, 2 * PAGE, "page_size is 2 in the host pool and 4 in"),
    ):
        with pytest.raises(InvalidPoolError, match=field):
            one_pool(simulated.device, compute, DevicePages(layers, page_size), host)
    _, other = pools_of("mla", "page_first")
    with pytest.raises(InvalidPoolError, match="rows of layer 0 is"):
        one_pool(simulated.device, compute, device, other)
    with pytest.raises(InvalidTransferError, match="way must be None or one of kernel, dma"):
        one_pool(simulated.device, compute, device, host, way="auto")
    with pytest.raises(InvalidPoolError, match="same number of slots, a multiple of 5"):
        DevicePages(device.layers, 5)
