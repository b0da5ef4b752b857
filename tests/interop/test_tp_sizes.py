"""Engines of different TP sizes on one store, by `tp_lcm_size`: SGLang's controllers and pools."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.interop.engine import PAGE_SIZE, PAGES, mha_pools, pages, scribble, tokens

pytestmark = pytest.mark.interop

SIZES = (1, 2, 4)
HEADS, LAYERS = 4, 3
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
HEAD_AXIS = {"layer_first": 3, "page_first": 3, "page_first_direct": 4, "page_head": 2}


@pytest.fixture
def engine(ranks, storage):
    """Makes the ranks of an engine of a TP size, attached to one store."""

    def make(size: int, *, layout: str = "page_head", **extra: object):
        made = []
        for rank in range(size):
            made.append(ranks(mha_pools(layout, heads=HEADS // size), tp_rank=rank, tp_size=size))
            made[-1].attach(*storage, **{"tp_lcm_size": 4, **extra})
        return made

    return make


def model_kv(layout: str) -> torch.Tensor:
    """What all heads have in the host pool of a rank that holds all of them."""
    pool = mha_pools(layout, heads=HEADS).kv
    scribble(pool, 7)
    return pool.kv_buffer.clone()


def heads_of(kv: torch.Tensor, layout: str, rank: int, size: int) -> torch.Tensor:
    return kv.chunk(size, dim=HEAD_AXIS[layout])[rank]


def write(engine, kv: torch.Tensor, layout: str, prompt: list[int]) -> None:
    """Store pages of a prompt from slot 0 on, each rank those of its heads."""
    for rank, member in enumerate(engine):
        member.pools.kv.clear()
        member.pools.kv.kv_buffer.copy_(heads_of(kv, layout, rank, len(engine)))
        indices = member.pools.kv.alloc(len(prompt))
        member.controller.write_storage(indices, prompt, hash_value=member.hashes(prompt))
        operation = member.controller.ack_backup_queue.get(timeout=30)
        assert operation.completed_tokens == len(prompt)


def restores(engine, kv: torch.Tensor, layout: str, prompt: list[int]) -> bool:
    for rank, member in enumerate(engine):
        member.wipe()
        result = member.prefetch(prompt)
        assert (result.hit_tokens, result.completed_tokens) == (len(prompt), len(prompt))
        expected = mha_pools(layout, heads=HEADS // len(engine)).kv
        expected.kv_buffer.copy_(heads_of(kv, layout, rank, len(engine)))
        first = torch.arange(len(prompt))
        if not all(map(torch.equal, member.contents(result), pages(expected, first))):
            return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tp_size_restores_what_every_other_has_stored(engine, layout):
    kv = model_kv(layout)
    engines = {size: engine(size, layout=layout) for size in SIZES}
    for number, (writers, readers) in enumerate(product(SIZES, SIZES)):
        prompt = tokens(5, start=1000 * number)
        write(engines[writers], kv, layout, prompt)
        assert restores(engines[readers], kv, layout, prompt), (writers, readers)
    assert all(member.bridge.refused_calls == 0 for each in engines.values() for member in each)


def test_the_heads_are_where_sglang_has_them():
    """SGLang's own addresses of the parts of `page_head`, and those that the bridge would take."""
    from hicache_storage.pools import page_access
    from hicache_storage.pools.shards import head_shards

    pool = mha_pools("page_head", heads=HEADS).kv
    scribble(pool, 3)
    slots = list(range(0, PAGES * PAGE_SIZE, PAGE_SIZE))
    addresses, lengths = pool.get_split_heads_page_buffer_meta(
        torch.arange(PAGES * PAGE_SIZE), HEADS
    )
    flat, start = pool.kv_buffer.view(torch.uint8).view(-1), pool.kv_buffer.data_ptr()
    theirs = iter(
        bytes(flat[at - start : at - start + length].tolist())
        for at, length in zip(addresses, lengths, strict=True)
    )
    shards = [shard.sources(slots) for shard in head_shards(page_access(pool), HEADS, "kv")]
    for page in range(PAGES):
        for shard in shards:
            assert [bytes(view) for view in shard[page]] == [next(theirs), next(theirs)]
