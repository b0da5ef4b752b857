"""The sparse kind: latent attention to those tokens that an indexer selects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hicache_storage import PoolName
from hicache_storage.hybrid import IndexerGeometry, MLAGeometry, StackConfig
from tiny_hybrid_lm_parts.arithmetic import OrderedArithmetic, total
from tiny_hybrid_lm_parts.model import HEADS, WIDTH, Layer, Model, Weights, causal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.pools import DevicePool
    from tiny_hybrid_lm_parts.model import Placed
    from tiny_hybrid_lm_parts.sizes import Sizes

LATENT = 16
ROPE = 16
INDEX_DIM = 16
SELECTED = 24
"""Tokens that a query attends to."""
LAYERS = (0, 1, 2)


def sparse_model(sizes: Sizes) -> Model:
    """Three layers of sparse attention. Its arithmetic is always ordered: which tokens are selected
    knows no tolerance."""
    weights = Weights(sizes.seed, sizes.dtype, sizes.device, OrderedArithmetic())
    config = StackConfig(
        attention=MLAGeometry(
            layers=LAYERS, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, dtype=sizes.dtype
        ),
        indexer=IndexerGeometry(
            layers=LAYERS, index_head_dim=INDEX_DIM, quant_block_size=INDEX_DIM
        ),
        **sizes.common(),
    )
    return Model(weights, [SparseLayer(weights, own) for own in LAYERS], config)


class SparseLayer(Layer):
    """Latent attention with an indexer of its own.

    Args:
        own: its number in both pools.
    """

    def __init__(self, weights: Weights, own: int) -> None:
        self._own = own
        self._arithmetic = weights.arithmetic
        self._queries = weights.draw(HEADS * (LATENT + ROPE), WIDTH)
        self._latents = weights.draw(LATENT + ROPE, WIDTH)
        self._index_queries = weights.draw(INDEX_DIM, WIDTH)
        self._index_keys = weights.draw(INDEX_DIM, WIDTH)
        self._out = weights.draw(WIDTH, HEADS * LATENT)

    def __call__(
        self,
        rows: torch.Tensor,
        segments: Sequence[Placed],
        pools: Mapping[PoolName, DevicePool],
    ) -> torch.Tensor:
        latents = pools[PoolName.KV].parts[0][self._own]
        index = IndexKeys(pools[PoolName.INDEXER], self._own)
        project = self._arithmetic.project
        places = torch.cat([torch.arange(segment.start, segment.end) for segment in segments])
        queries = _turned(project(rows, self._queries).view(-1, HEADS, LATENT + ROPE), places)
        new = _turned(project(rows, self._latents).unsqueeze(1), places)
        index_queries, index_keys = (
            project(rows, self._index_queries),
            project(rows, self._index_keys),
        )
        seen: list[torch.Tensor] = []
        for segment in segments:
            latents[segment.new] = new[segment.at]
            index.write(segment.new, index_keys[segment.at])
            visible = _selected(
                total(index_queries[segment.at].float().unsqueeze(1) * index.read(segment.rows)),
                causal(segment),
            )
            keys = latents[segment.rows]
            seen.append(
                self._arithmetic.attend(
                    queries[segment.at], keys, keys[..., :LATENT], visible
                ).flatten(1)
            )
        return project(torch.cat(seen), self._out)


class IndexKeys:
    """Keys of one layer as bytes with a float32 scale each: all keys of a page, then all its
    scales."""

    def __init__(self, pool: DevicePool, own: int) -> None:
        self._page_size = pool.page_size
        pages, keys_end = pool.parts[0][own], pool.page_size * INDEX_DIM
        self._keys = pages[:, :keys_end].view(-1, pool.page_size, INDEX_DIM)
        self._scales = pages[:, keys_end:].view(torch.float32)

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Quantize (tokens, INDEX_DIM)."""
        page, place = slots // self._page_size, slots % self._page_size
        scales = keys.float().abs().amax(1) * (1 / 127) + 1e-9
        self._keys[page, place] = ((keys.float() / scales.unsqueeze(1)).round() + 128).to(
            torch.uint8
        )
        self._scales[page, place] = scales

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """(tokens, INDEX_DIM) as they were, but for what quantizing took."""
        page, place = slots // self._page_size, slots % self._page_size
        return (self._keys[page, place].float() - 128) * self._scales[page, place].unsqueeze(1)


def _selected(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(tokens, length): the keys of the highest scores, of equal ones the first."""
    order = (
        scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    )
    return torch.zeros_like(visible).scatter(1, order[:, :SELECTED], value=True) & visible


def _turned(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows (tokens, heads, LATENT + ROPE) whose last part is turned by its place, pair by pair."""
    half = ROPE // 2
    angles = [[place / 100 ** (pair / half) for pair in range(half)] for place in map(int, places)]
    # Tables from Python's own functions: torch's depend on the length of the tensor.
    cosines, sines = (
        torch.tensor(
            [[turn(angle) for angle in row] for row in angles], dtype=rows.dtype, device=rows.device
        ).unsqueeze(1)
        for turn in (math.cos, math.sin)
    )
    plain, left, right = (
        rows[..., :LATENT],
        rows[..., LATENT : LATENT + half],
        rows[..., LATENT + half :],
    )
    return torch.cat(
        [plain, left * cosines - right * sines, left * sines + right * cosines], dim=-1
    )
