"""Pools of one model moved together: attention and Mamba layers, latent rows and their index."""

from __future__ import annotations

import pytest
import torch
from transfer_bench import KINDS, PAGES, Rig, poison, random_bytes, same

from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer import Indices, PageTransfers, PoolPair
from hicache_storage.transfer.plan import WAYS
from hicache_storage.transfer.pool_copies import IN, OUT

ATTENTION, MAMBA = [1, 4, 5], [0, 2, 3]


class Model(Rig):
    """A hybrid model's pools full of poison, its transfers, and kernels that go through its
    layers."""

    def __init__(self, place, way, maps=None):
        super().__init__(place)
        self.maps = maps or {"kv": ("mha", ATTENTION), "mamba": ("mamba", MAMBA)}
        pairs = {
            name: KINDS[kind].pair("page_first", place.where, layers=layers)
            for name, (kind, layers) in self.maps.items()
        }
        for pair in pairs.values():
            poison(*pair)
        self.device = {name: device for name, (device, _) in pairs.items()}
        self.host = {name: host for name, (_, host) in pairs.items()}
        self.transfers = PageTransfers(
            place.device,
            self.compute,
            {name: PoolPair(*pair) for name, pair in pairs.items()},
            way=way,
            staging_bytes=1,
        )
        if place.where == "cuda":
            # Kernels are loaded before one waits for the host.
            self.transfers.write_back(self.indices((0,), (0,))).synchronize()
            self.transfers.load(self.indices((0,), (0,))).synchronize()
            torch.cuda.synchronize()

    def slots(self, name, *pages):
        size = self.device[name].page_size
        return torch.tensor([page * size + offset for page in pages for offset in range(size)])

    def indices(self, device_pages, host_pages):
        """The same page numbers in all pools."""
        return {
            name: Indices(self.slots(name, *device_pages), self.slots(name, *host_pages))
            for name in self.maps
        }

    def run_kernels(self, page, seed, pools=None):
        """Launch kernels that write a page of pools, of all by default, layer by layer of the
        model; what they write."""
        self.transfers.before_overwrite(
            {name: self.slots(name, page) for name in pools or self.maps}
        )
        self.place.delay(self.compute)
        generator = torch.Generator().manual_seed(seed)
        written = []
        for layer, part in self._parts(pools):
            content = random_bytes(part[page], generator).to(self.place.where)
            self.compute.copy(
                part[page], content, f"kernel that writes layer {layer} of page {page}"
            )
            written.append([content])
        return written

    def read(self, page, counter):
        """Launch kernels that read a page of every pool, each layer of the model behind its
        event."""
        seen = []
        for layer, part in self._parts():
            counter.wait(layer, self.compute)
            seen.append([self.see(part[page], f"kernel that reads layer {layer} of page {page}")])
        return seen

    def _parts(self, pools=None):
        for layer in range(self.transfers.layer_num):
            for name, (_, layers) in self.maps.items():
                if layer in layers and (pools is None or name in pools):
                    own = layers.index(layer)
                    yield from ((layer, part) for part in self.device[name].layer(own))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "maps", [None, {"kv": ("mla", range(3)), "indexer": ("indexer", range(3))}]
)
def test_pools_move_together(place, way, maps):
    move_together(Model(place, way, maps))


def move_together(model):
    """Pages of all pools go out, are overwritten, and come back elsewhere."""
    contents = [model.run_kernels(page, seed) for seed, page in enumerate((4, 0))]
    acknowledgement = model.transfers.write_back(model.indices((4, 0), (1, 3)))
    for page in (4, 0):
        model.run_kernels(page, 9)
    counter = model.transfers.load(model.indices((2, 5), (1, 3)))
    seen = [model.read(page, counter) for page in (2, 5)]
    model.wait(acknowledgement)
    model.finish()
    assert all(map(same, seen, contents))
    assert counter.done()


def overwrite_one_pool(name):
    """Pages of all pools go out and come in; of one pool, kernels overwrite them at once."""

    def program(model):
        model.transfers.write_back(model.indices((4,), (1,)))
        model.run_kernels(4, 1, [name])
        model.transfers.load(model.indices((2,), (1,)))
        model.run_kernels(2, 2, [name])
        model.finish()

    return program


def without_end(pool, direction):
    """One pool does not note the copies of a direction."""

    def break_it(model):
        copies = model.transfers.pools[pool]
        end = copies.end
        copies.end = lambda way, *rest: None if way == direction else end(way, *rest)

    return break_it


MUTANTS = [(pool, direction) for pool in ("kv", "mamba") for direction in (OUT, IN)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("pool", "direction"), MUTANTS)
def test_the_events_of_each_pool_are_missed(simulated, way, pool, direction):
    """The other events have their mutants in `test_stream_rules.py`: they are those of one pool."""
    overwrite_one_pool(pool)(Model(simulated, way))
    broken = Model(simulated, way)
    without_end(pool, direction)(broken)
    with pytest.raises(AssertionError):
        overwrite_one_pool(pool)(broken)


@pytest.mark.parametrize("way", WAYS)
def test_one_state_goes_to_two_slots(place, way):
    """A hit's state is copied to the slot of its node and to that of the request."""
    model = Model(place, way)
    content = model.run_kernels(4, 0)
    model.transfers.write_back(model.indices((4,), (1,)))
    state = Indices(model.slots("mamba", 2, 5), model.slots("mamba", 1, 1))
    counter = model.transfers.load(
        {"kv": Indices(model.slots("kv", 2), model.slots("kv", 1)), "mamba": state}
    )
    first = model.read(2, counter)
    counter = model.transfers.load({"kv": Indices(model.slots("kv", 5), model.slots("kv", 1))})
    second = model.read(5, counter)
    model.finish()
    assert same(first, content)
    assert same(second, content)


@pytest.mark.parametrize("way", WAYS)
def test_layers_come_in_the_order_of_the_model(simulated, way):
    model = Model(simulated, way)
    content = model.run_kernels(4, 0)
    model.transfers.write_back(model.indices((4,), (1,))).synchronize()
    # Layer 3 of the model is the last one of the Mamba pool, and layer 4 the second of attention.
    simulated.hold()
    counter = model.transfers.load(model.indices((2,), (1,)))
    counter.wait(2, model.compute)
    sources = (*model.device["mamba"].layer(0), *model.device["kv"].layer(0))
    seen = [model.see(part[2], "kernel that reads layers 0 and 1") for part in sources]
    model.compute.synchronize()
    assert not counter.done()
    counter.synchronize()
    assert counter.done()
    assert model.transfers.layer_num == 6
    simulated.check()
    assert same([seen], [[part for (part,) in content[: len(seen)]]])


def test_pools_without_pages_are_left_out(simulated):
    model = Model(simulated, None)
    content = model.run_kernels(4, 0)
    pages = {"mamba": Indices(model.slots("mamba", 4), model.slots("mamba", 1))}
    model.transfers.write_back(pages).synchronize()
    model.transfers.load(
        {"mamba": Indices(model.slots("mamba", 2), model.slots("mamba", 1))}
    ).synchronize()
    states = [part for layer, part in model._parts() if layer in MAMBA]
    written = [
        part for (layer, _), (part,) in zip(model._parts(), content, strict=True) if layer in MAMBA
    ]
    assert same([[state[2] for state in states]], [written])


def test_nothing_is_enqueued_where_one_pool_refuses(simulated):
    model = Model(simulated, None)
    good = Indices(model.slots("kv", 0), model.slots("kv", 0))
    bad = Indices(model.slots("mamba", 0), model.slots("mamba", PAGES))
    for move in (model.transfers.write_back, model.transfers.load):
        with pytest.raises(InvalidTransferError, match="host_indices must be slots in"):
            move({"kv": good, "mamba": bad})
        with pytest.raises(InvalidTransferError, match="no such pool: swa; there are kv, mamba"):
            move({"kv": good, "swa": good})
    with pytest.raises(InvalidTransferError, match="no such pool: swa"):
        model.transfers.before_overwrite({"kv": good.device, "swa": good.device})
    assert not any(fences._count for fences in model.transfers.pools["kv"]._fences.values())


class Refused(Exception):
    pass


def refuse(*arguments):
    raise Refused


@pytest.mark.parametrize("way", WAYS)
def test_what_was_enqueued_before_a_failure_is_fenced(simulated, way):
    """The second pool cannot be copied: the first one's copies run all the same, and nobody
    overwrites what they use."""
    model = Model(simulated, way)
    engine, second = model.transfers.pools["kv"], model.transfers.pools["mamba"]
    host = engine.host_slots.alloc(model.device["kv"].page_size)
    pages = {
        "kv": Indices(model.slots("kv", 4), host),
        "mamba": Indices(model.slots("mamba", 4), model.slots("mamba", 1)),
    }
    simulated.hold()
    second.begin = refuse
    with pytest.raises(Refused):
        model.transfers.write_back(pages)
    free = engine.host_slots.available_size()
    engine.host_slots.free(host)
    assert engine.host_slots.available_size() == free
    model.run_kernels(4, 1, ["kv"])
    model.transfers.synchronize()
    assert engine.host_slots.available_size() == free + host.numel()
    with pytest.raises(Refused):
        model.transfers.load({"kv": Indices(model.slots("kv", 2), host), "mamba": pages["mamba"]})
    model.run_kernels(2, 2, ["kv"])
    model.finish()
    simulated.check()


def test_an_engine_has_a_pool(simulated):
    with pytest.raises(InvalidPoolError, match="at least one pool"):
        PageTransfers(simulated.device, simulated.device.stream("compute"), {})
