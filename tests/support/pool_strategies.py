"""Pools of any kind and layout, with odd lengths of everything, drawn by Hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from hicache_storage.pools import DevicePool, PagedHostPool
from tests.support.pools import SHAPES, make_pool

TYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]
small = st.integers(1, 9)
row = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def pool_pairs(draw):
    """A device pool on the CPU, and the host pool that backs it up."""
    kind, dtype = draw(st.sampled_from(sorted(SHAPES))), draw(st.sampled_from(TYPES))
    fields = {
        "mha": {"head_num": small, "head_dim": st.integers(1, 40), "v_head_dim": st.none() | small},
        "mla": {"kv_lora_rank": st.integers(1, 40)},
        "mamba": {"temporal_shape": row | st.just([0, 2]), "conv_shapes": st.tuples(row, row)},
        "indexer": {"index_head_dim": st.just(16), "quant_block_size": st.sampled_from([4, 16])},
    }[kind]
    made = {name: draw(field) for name, field in fields.items()}
    match kind:
        case "mamba":
            made |= {"temporal_dtype": dtype, "conv_dtype": torch.bfloat16}
        case "mha" | "mla":
            made["dtype"] = dtype
    page_size = 1 if kind == "mamba" else draw(small)
    made |= {"layers": range(draw(st.integers(1, 3))), "page_size": page_size}
    made["size"] = page_size * draw(st.integers(1, 7))
    layout = draw(st.sampled_from([*SHAPES[kind].ORDERS]))
    return (
        make_pool(DevicePool, kind, device="cpu", **made),
        make_pool(PagedHostPool, kind, layout=layout, pin_memory=False, **made),
    )
