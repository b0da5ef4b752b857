"""Pools of every kind and layout: their tensors and pages, what fits what, and refused arguments."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
import torch

from hicache_storage.pools import DevicePool, PagedHostPool
from hicache_storage.spec import HostPool, InvalidPoolError
from tests.support.pools import make_pool

LAYERS, PAGES, P = 3, 5, 4
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
STATE = {"conv_shapes": ((5,), (3, 2)), "temporal_dtype": torch.float32, "conv_dtype": BF16}
FIELDS = {
    "mha": {"head_num": 2, "head_dim": 6, "v_head_dim": 6, "dtype": BF16},
    "mha, V longer": {"head_num": 2, "head_dim": 6, "v_head_dim": 10, "dtype": BF16},
    "mla": {"kv_lora_rank": 7, "dtype": FP8},
    "mamba": {"temporal_shape": (2, 3), **STATE},
    "mamba, no temporal state": {"temporal_shape": (0, 3), **STATE},
    "indexer": {"index_head_dim": 32, "quant_block_size": 16},
}
ROWS = {
    "mha": [(2, 6), (2, 6)],
    "mha, V longer": [(2, 6), (2, 10)],
    "mla": [(1, 7)],
    "mamba": [(2, 3), (5,), (3, 2)],
    "mamba, no temporal state": [(0, 3), (5,), (3, 2)],
    "indexer": [(P * (32 + 2 * 4),)],
}
"""Shape of a row of each part: of a token, or of the whole page."""
TOKENS = {"layer_first": "LS*", "page_first": "SL*", "page_first_direct": "NLP*"}
AXES = {
    "mha": {**TOKENS, "page_head": "NhPL*"},
    "mla": TOKENS,
    "mamba": {"layer_first": "LS*", "page_first": "SL1*", "page_first_direct": "SL1*"},
    "indexer": {"layer_first": "LN*", "page_first": "NL1*", "page_first_direct": "NL1*"},
}
"""Documented axes: layers, slots, pages, slots of a page; of a row all, or heads and the others."""
POOLS = [
    (name, layout, axes) for name in FIELDS for layout, axes in AXES[name.split(",")[0]].items()
]
KIND = pytest.mark.parametrize("name", FIELDS)


def pools(name, **changes):
    """The device pool, or the host pool where a layout is given."""
    kind = name.split(",")[0]
    page_size = 1 if kind == "mamba" else P
    where = {} if "layout" in changes else {"device": "cpu"}
    size = {"size": PAGES * page_size, "page_size": page_size, "layers": range(LAYERS)}
    pool = PagedHostPool if "layout" in changes else DevicePool
    return make_pool(pool, kind, **{**size, **FIELDS[name], **where, **changes})


def raw(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def fill(pool):
    generator = torch.Generator().manual_seed(7)
    for buffer in pool.buffers:
        flat = buffer.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8))


def components(pool, axes, page):
    """The components of a page, by the documented axes, in the order of SGLang's pointers."""
    slots = slice(page * pool.page_size, (page + 1) * pool.page_size) if "S" in axes else page
    parts = [part for part in pool.parts if part.numel()]
    if axes[0] != "L":
        return [raw(part[slots]) for part in parts]
    layers = [[raw(part[layer][slots]) for layer in range(LAYERS)] for part in parts]
    # K and V of each layer in turn, but all layers of a state's part.
    turns = zip(*layers, strict=True) if pool.geometry.head_num else layers
    return [component for turn in turns for component in turn]


def by_layer(pool, part, axes):
    """A part in the order layers, pages, rows of a page, elements of a row."""
    slots = axes.find("S")
    if slots >= 0:
        part, axes = part.unflatten(slots, (PAGES, pool.page_size)), axes.replace("S", "NP")
    axes = axes.replace("1", "P")
    if "P" not in axes:
        part, axes = part.unsqueeze(2), axes.replace("*", "P*")
    return part.movedim([axes.index(letter) for letter in "LNP"], (0, 1, 2))


@pytest.mark.parametrize(("name", "layout", "axes"), POOLS)
def test_a_host_pool_is_as_documented(name, layout, axes):
    pool = pools(name, layout=layout)
    fill(pool)
    lengths = {"L": LAYERS, "S": pool.size, "N": PAGES, "P": P, "1": 1}
    for part, row in zip(pool.parts, ROWS[name], strict=True):
        head, rest = (row[:1], row[1:]) if "h" in axes else ((), row)
        shape = [
            length
            for letter in axes
            for length in {"h": head, "*": rest}.get(letter, [lengths.get(letter)])
        ]
        assert list(part.shape) == shape
    for buffer in pool.buffers:
        assert buffer.is_contiguous()
        assert not buffer.numel() or buffer.data_ptr() % 4096 == 0
    # The halves of one tensor, where they have one length.
    assert len(pool.buffers) == (1 if name == "mha" else len(ROWS[name]))
    filled = [by_layer(pool, part, axes) for part in pool.parts if part.numel()]
    for layer in range(LAYERS):
        found = pool.layer(layer)
        assert [raw(part) for part in found] == [raw(part[layer]) for part in filled]
        assert [part.data_ptr() for part in found] == [part[layer].data_ptr() for part in filled]


@pytest.mark.parametrize(("name", "layout", "axes"), POOLS)
def test_pages_are_their_components(name, layout, axes):
    pool = pools(name, layout=layout)
    assert isinstance(pool, HostPool)
    fill(pool)
    before = [components(pool, axes, page) for page in range(PAGES)]
    geometry, firsts = pool.geometry, [page * pool.page_size for page in range(PAGES)]
    assert geometry.component_bytes == tuple(map(len, before[0]))
    assert (geometry.layout, geometry.page_size, geometry.size) == (
        layout,
        pool.page_size,
        pool.size,
    )
    assert geometry.page_bytes * PAGES == sum(buffer.nbytes for buffer in pool.buffers)
    assert geometry.page_bytes == pool.shape.page_bytes(pool.page_size)
    found = pool.page_buffers(firsts[::-1])
    assert [list(map(bytes, page)) for page in found] == before[::-1]
    assert all(view.format == "B" and not view.readonly for page in found for view in page)
    assert pool.page_buffers([]) == []
    for view in pool.page_buffers([firsts[2]])[0]:
        view[:] = bytes(255 - byte for byte in view)
    before[2] = [bytes(255 - byte for byte in component) for component in before[2]]
    assert [components(pool, axes, page) for page in range(PAGES)] == before


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("mha", "layout", AXES["mha"]),
        ("mla", "dtype", (torch.int8, FP8)),
        ("mamba", "conv_dtype", (torch.half, BF16)),
        ("mamba", "temporal_dtype", (torch.float32, torch.int32)),
    ],
)
def test_what_differs_is_another_geometry(name, field, values):
    """Pages of equal length that mean something else never share a namespace."""
    shapes = [{"layout": "page_first", field: value} for value in values]
    assert len({pools(name, **shape).geometry for shape in shapes}) == len(shapes)


# Device pools
# ---------------------------------------------------------------------------------------------


@KIND
def test_each_layer_has_tensors_of_its_own(name):
    pool = pools(name)
    rows = [row for row in ROWS[name] if prod(row)]
    step = 1 if name in ("indexer", "mamba") or pool.page_size == 1 else P
    for layer in range(LAYERS):
        tensors, views = pool.layers[layer], pool.layer(layer)
        assert [tuple(tensor.shape) for tensor in tensors] == [(PAGES * step, *row) for row in rows]
        assert [tuple(view.shape) for view in views] == [(PAGES, step, *row) for row in rows]
        assert all(tensor.is_contiguous() and not tensor.any() for tensor in tensors)
        assert [each.data_ptr() for each in tensors] == [each.data_ptr() for each in views]
    memory = {tensor.data_ptr() for layer in pool.layers for tensor in layer}
    assert len(memory) == LAYERS * len(rows)
    taken = pool.alloc(pool.size)
    assert pool.alloc(pool.page_size) is None
    assert pool.free(taken) == pool.available_size() == pool.size


@KIND
def test_a_host_pool_of_the_same_shape_fits(name):
    pool, kind = pools(name), name.split(",")[0]
    for layout in AXES[kind]:
        pool.check_host_pool(pools(name, layout=layout, size=4 * P, pin_memory=False))
    for other in set(FIELDS) - {name}:
        with pytest.raises(InvalidPoolError, match=r" is .* in the host pool and .* in the device"):
            pool.check_host_pool(pools(other, layout="page_first"))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("mha", {"page_size": 2}, "page_size"),
        ("mha", {"layers": range(4)}, "layer_num"),
        ("mha", {"head_num": 1}, "rows of layer 0"),
        ("mha", {"v_head_dim": 4}, "rows of layer 0"),
        ("mla", {"dtype": torch.float8_e5m2}, "element type"),
        ("mamba", {"temporal_shape": (3, 2)}, "rows of layer 0"),
        ("mamba", {"conv_dtype": torch.float16}, "element type"),
        ("indexer", {"quant_block_size": 32}, "rows of layer 0"),
    ],
)
def test_a_host_pool_that_differs_is_refused_by_field(name, changes, field):
    with pytest.raises(InvalidPoolError, match=f"{field}.* is .* in the host pool and .* in the"):
        pools(name).check_host_pool(pools(name, layout="page_first", **changes))


def test_the_zeros_are_there_before_any_stream_writes(monkeypatch):
    """No stream of a model or a copy waits for the one on which they come."""
    waited, zeros = [], torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda shape, *, dtype, device=None: zeros(shape, dtype=dtype)
    )
    stream = SimpleNamespace(synchronize=lambda: waited.append("synchronized"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: waited.append(device) or stream
    )
    pools("mla", device="cuda:1")
    assert waited == [torch.device("cuda", 1), "synchronized"]


# Refused arguments
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("mha", {"size": 7}, "size must be a positive multiple of page_size, got 7 and 4"),
        ("mha", {"size": 0}, "size must be a positive multiple of page_size, got 0 and 4"),
        ("mha", {"page_size": 0}, "size must be a positive multiple of page_size"),
        ("mha", {"layers": range(0)}, "layers must name at least one layer"),
        ("mha", {"layers": (1, 0)}, "layers must be ascending numbers from 0 on"),
        ("mha", {"head_num": -1}, "head_num must be at least 1"),
        ("mha", {"head_dim": 0}, "head_dim must be at least 1"),
        ("mha", {"v_head_dim": 0}, "v_head_dim must be at least 1"),
        ("mha", {"dtype": "float16"}, "dtype must be a torch.dtype such as .*, got 'float16'"),
        ("mla", {"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        ("mla", {"qk_rope_head_dim": -1}, "qk_rope_head_dim must not be negative"),
        ("mla", {"dtype": None}, "dtype must be a torch.dtype"),
        ("mamba", {"page_size": 5}, "page_size of a state pool must be 1"),
        ("mamba", {"state_chunk": 0}, "state_chunk must be at least 1"),
        ("mamba", {"temporal_dtype": 4}, "temporal_dtype must be a torch.dtype"),
        ("mamba", {"conv_dtype": "half"}, "conv_dtype must be a torch.dtype"),
        ("mamba", {"temporal_shape": (2, -1)}, "temporal_shape must not hold negative numbers"),
        ("mamba", {"conv_shapes": [(2,), (0,)]}, r"conv_shapes\[1\] must hold positive numbers"),
        ("mamba, no temporal state", {"conv_shapes": []}, "a page would have no bytes"),
        ("indexer", {"index_head_dim": 100}, r"\(16\) must divide index_head_dim \(100\)"),
        ("indexer", {"quant_block_size": 0}, "quant_block_size must be at least 1"),
    ],
)
def test_bad_arguments_name_the_field(name, bad, message):
    for where in ({}, {"layout": "page_first"}):
        with pytest.raises(InvalidPoolError, match=message):
            pools(name, **bad, **where)


@KIND
def test_other_layouts_and_sizes_are_refused(name):
    with pytest.raises(InvalidPoolError, match=r"layout must be one of layer_first, page_first.*"):
        pools(name, layout="page_last")
    with pytest.raises(InvalidPoolError, match=r"cannot map .* bytes of host memory"):
        pools(name, layout="page_first", size=4 << 50)
    with pytest.raises(InvalidPoolError, match="cannot allocate"):
        pools(name, size=4 << 50)
