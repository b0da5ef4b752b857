"""The hybrid kind: grouped-query attention, and selective state spaces with a convolution before
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage import PoolName
from hicache_storage.hybrid import AttentionGeometry, MambaGeometry, StackConfig
from tiny_hybrid_lm_parts.arithmetic import (
    NativeArithmetic,
    OrderedArithmetic,
    gated,
    positive,
    total,
)
from tiny_hybrid_lm_parts.model import HEADS, WIDTH, Layer, Model, Weights, causal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.pools import DevicePool
    from tiny_hybrid_lm_parts.model import Placed
    from tiny_hybrid_lm_parts.sizes import Sizes

KV_HEADS = 2
HEAD_DIM = 8
CHANNELS = 32
STATE = 8
"""Numbers per channel."""
WINDOW = 4
"""Tokens that the convolution sees; the state keeps one less."""
ATTENTION_LAYERS = (1, 3)
MAMBA_LAYERS = (0, 2, 4)


def mamba_model(sizes: Sizes) -> Model:
    """Five layers: state spaces, with attention between them. In float32 its arithmetic is ordered,
    otherwise torch's own."""
    arithmetic = OrderedArithmetic() if sizes.dtype == torch.float32 else NativeArithmetic()
    weights = Weights(sizes.seed, sizes.dtype, sizes.device, arithmetic)
    made: dict[int, Layer] = {
        layer: AttentionLayer(weights, own) for own, layer in enumerate(ATTENTION_LAYERS)
    }
    made |= {layer: MambaLayer(weights, own) for own, layer in enumerate(MAMBA_LAYERS)}
    config = StackConfig(
        attention=AttentionGeometry(
            layers=ATTENTION_LAYERS, head_num=KV_HEADS, head_dim=HEAD_DIM, dtype=sizes.dtype
        ),
        mamba=MambaGeometry(
            layers=MAMBA_LAYERS,
            temporal_shape=(CHANNELS, STATE),
            conv_shapes=((CHANNELS, WINDOW - 1),),
            temporal_dtype=torch.float32,
            conv_dtype=sizes.dtype,
        ),
        checkpoint_interval=sizes.interval,
        device_states=sizes.device_states,
        host_states=sizes.host_states,
        **sizes.common(),
    )
    return Model(weights, [made[layer] for layer in sorted(made)], config)


class AttentionLayer(Layer):
    """Grouped-query attention.

    Args:
        own: its number in the KV pool.
    """

    def __init__(self, weights: Weights, own: int) -> None:
        self._own = own
        self._arithmetic = weights.arithmetic
        self._queries = weights.draw(HEADS * HEAD_DIM, WIDTH)
        self._keys = weights.draw(KV_HEADS * HEAD_DIM, WIDTH)
        self._values = weights.draw(KV_HEADS * HEAD_DIM, WIDTH)
        self._out = weights.draw(WIDTH, HEADS * HEAD_DIM)

    def __call__(
        self,
        rows: torch.Tensor,
        segments: Sequence[Placed],
        pools: Mapping[PoolName, DevicePool],
    ) -> torch.Tensor:
        pool = pools[PoolName.KV]
        keys, values = pool.parts[0][self._own], pool.parts[1][self._own]
        project = self._arithmetic.project
        queries = project(rows, self._queries).view(-1, HEADS, HEAD_DIM)
        new_keys, new_values = (
            project(rows, weight).view(-1, KV_HEADS, HEAD_DIM)
            for weight in (self._keys, self._values)
        )
        seen: list[torch.Tensor] = []
        for segment in segments:
            keys[segment.new], values[segment.new] = new_keys[segment.at], new_values[segment.at]
            found = self._arithmetic.attend(
                queries[segment.at],
                _to_all_heads(keys[segment.rows]),
                _to_all_heads(values[segment.rows]),
                causal(segment),
            )
            seen.append(found.flatten(1))
        return project(torch.cat(seen), self._out)


class MambaLayer(Layer):
    """A convolution over the last tokens, then a state per channel that decays and takes in as the
    token says.

    Args:
        own: its number in the pool of states.
    """

    def __init__(self, weights: Weights, own: int) -> None:
        self._own = own
        self._arithmetic = weights.arithmetic
        self._inputs = weights.draw(CHANNELS, WIDTH)
        self._gates = weights.draw(CHANNELS, WIDTH)
        self._taps = weights.draw(CHANNELS, WINDOW)
        self._steps = weights.draw(CHANNELS, CHANNELS)
        self._writes = weights.draw(STATE, CHANNELS)
        self._reads = weights.draw(STATE, CHANNELS)
        self._rates = torch.arange(1, STATE + 1, device=weights.device) * 0.25
        self._out = weights.draw(WIDTH, CHANNELS)

    def __call__(
        self,
        rows: torch.Tensor,
        segments: Sequence[Placed],
        pools: Mapping[PoolName, DevicePool],
    ) -> torch.Tensor:
        pool = pools[PoolName.MAMBA]
        temporal, windows = pool.parts[0][self._own], pool.parts[1][self._own]
        project = self._arithmetic.project
        inputs = project(rows, self._inputs)
        mixed = torch.cat(
            [self._convolved(inputs[segment.at], segment, windows) for segment in segments]
        )
        steps = positive(project(mixed, self._steps)).float().unsqueeze(2)
        decay = 1 / (steps * self._rates + 1)
        taken = steps * mixed.unsqueeze(2) * project(mixed, self._writes).unsqueeze(1)
        states = torch.cat(
            [_scanned(decay[each.at], taken[each.at], each, temporal) for each in segments]
        )
        found = total(states * project(mixed, self._reads).unsqueeze(1)).to(rows.dtype)
        return project(found * gated(project(rows, self._gates)), self._out)

    def _convolved(
        self, inputs: torch.Tensor, segment: Placed, windows: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, CHANNELS); leaves the last inputs in the slot."""
        window = windows[segment.slot].T
        before = window if segment.start else torch.zeros_like(window)
        padded = torch.cat([before, inputs])
        windows[segment.slot] = padded[1 - WINDOW :].T
        mixed = padded[: len(inputs)] * self._taps[:, 0]
        for tap in range(1, WINDOW):
            mixed = mixed + padded[tap : tap + len(inputs)] * self._taps[:, tap]
        return gated(mixed)


def _scanned(
    decay: torch.Tensor, taken: torch.Tensor, segment: Placed, temporal: torch.Tensor
) -> torch.Tensor:
    """(tokens, CHANNELS, STATE), the state after each token; leaves the last in the slot."""
    state = (
        temporal[segment.slot].clone()
        if segment.start
        else torch.zeros_like(temporal[segment.slot])
    )
    states: list[torch.Tensor] = []
    for kept, new in zip(decay, taken, strict=True):
        state = kept * state + new
        states.append(state)
    temporal[segment.slot] = state
    return torch.stack(states)


def _to_all_heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.repeat_interleave(HEADS // KV_HEADS, dim=1)
