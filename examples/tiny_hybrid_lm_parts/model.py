"""A language model in plain torch whose cache lies in a stack's device pools: what all kinds of it
share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_storage import PoolName
from hicache_storage.pools import DevicePool
from tiny_hybrid_lm_parts.arithmetic import OrderedArithmetic, normalized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid import StackConfig
    from tiny_hybrid_lm_parts.arithmetic import Arithmetic

VOCABULARY = 128
WIDTH = 32
"""Of the residual stream. All widths are powers of two, see `total`."""
HEADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens of one sequence that follow each other, to be computed now."""

    tokens: Sequence[int]
    start: int
    """Their place in the sequence."""
    rows: torch.Tensor
    """int64: the KV slots of the sequence, from its first token to the end of the segment at
    least."""
    slot: int = 0
    """Its state slot, in a model with states: the state after `start` tokens comes from there, and
    the new one goes there."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A segment among those that are computed together."""

    at: slice
    """Its tokens among all."""
    start: int
    end: int
    new: torch.Tensor
    """Slots of its tokens, on the device."""
    rows: torch.Tensor
    """Slots of the sequence up to its end, on the device."""
    slot: int


class Layer(ABC):
    """Mixes tokens, and keeps what later tokens need in its pools."""

    @abstractmethod
    def __call__(
        self,
        rows: torch.Tensor,
        segments: Sequence[Placed],
        pools: Mapping[PoolName, DevicePool],
    ) -> torch.Tensor:
        """(tokens, WIDTH) to (tokens, WIDTH)."""


class Weights:
    """Random weights, the same for the same seed, and the arithmetic that layers use with them."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str, arithmetic: Arithmetic) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.device = device
        self.arithmetic = arithmetic

    def draw(self, *shape: int) -> torch.Tensor:
        """A weight whose products with a normalized row are about 1."""
        drawn = torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5
        return drawn.to(device=self.device, dtype=self.dtype)


class Model:
    """Embedding, layers with residuals, and logits.

    Args:
        layers: called in this order.
        config: of the stack whose device pools hold the cache.
    """

    def __init__(self, weights: Weights, layers: Sequence[Layer], config: StackConfig) -> None:
        self.config = config
        self._layers = layers
        self._device = weights.device
        self._arithmetic = weights.arithmetic
        self._embedding = weights.draw(VOCABULARY, WIDTH)
        self._readout = weights.draw(VOCABULARY, WIDTH)

    @property
    def exact(self) -> bool:
        """True if logits do not depend on batching, bit by bit."""
        return isinstance(self._arithmetic, OrderedArithmetic)

    def forward(
        self,
        segments: Sequence[Segment],
        pools: Mapping[PoolName, DevicePool],
        wait: Callable[[int], None],
    ) -> list[torch.Tensor]:
        """Compute tokens of several sequences together.

        Args:
            pools: hold the cache of the tokens before, and get that of these.
            wait: called with the number of each layer before its pools are touched.

        Returns:
            For each segment the logits (tokens, VOCABULARY).
        """
        placed = list(self._placed(segments))
        tokens = torch.tensor(
            [token for segment in segments for token in segment.tokens], device=self._device
        )
        rows = self._embedding[tokens]
        for number, layer in enumerate(self._layers):
            wait(number)
            rows = rows + layer(normalized(rows), placed, pools)
        logits = self._arithmetic.project(normalized(rows), self._readout)
        return [logits[segment.at] for segment in placed]

    def recompute(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of a whole sequence, in memory of its own."""
        size = -(-len(tokens) // self.config.page_size) * self.config.page_size
        place = torch.device(self._device)
        pools = {
            name: DevicePool(shape, size=1, page_size=1, device=place)
            if name is PoolName.MAMBA
            else DevicePool(shape, size=size, page_size=self.config.page_size, device=place)
            for name, shape in self.config.pools.items()
        }
        return self.forward([Segment(tokens, 0, torch.arange(size))], pools, lambda _: None)[0]

    def _placed(self, segments: Sequence[Segment]) -> list[Placed]:
        placed: list[Placed] = []
        at = 0
        for segment in segments:
            rows = segment.rows[: segment.end].to(self._device)
            end = at + len(segment.tokens)
            placed.append(
                Placed(
                    slice(at, end),
                    segment.start,
                    segment.end,
                    rows[segment.start :],
                    rows,
                    segment.slot,
                )
            )
            at = end
        return placed


def causal(segment: Placed) -> torch.Tensor:
    """(tokens, length): each token sees itself and those before."""
    places = torch.arange(segment.end, device=segment.rows.device)
    return places <= places[segment.start :].unsqueeze(1)
