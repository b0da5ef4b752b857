"""Gated delta nets (arXiv:2412.06464) as their formulas have them, one token after another; tensors
are those of SGLang's CPU engine.

A layer keeps two states for a sequence: the last inputs of its convolution, (channels, width - 1),
and the temporal one, S, whose shape is (value heads, value width, key width).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu, softplus

if TYPE_CHECKING:
    from collections.abc import Sequence


def causal_conv1d_fn_cpu(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
) -> torch.Tensor:
    """Convolve each channel with its weights, over its own past alone: y_t = act(sum_j w_j x_(t -
    width + 1 + j) + b).

    Args:
        inputs: (channels, tokens), the sequences one after another, from `query_start_loc[i]` to
            `query_start_loc[i + 1]`.
        weights: (channels, width).
        bias: (channels), or none.
        activation: `silu`.
        conv_states: (slots, channels, width - 1); the inputs before each sequence, which those at
            its end replace.
        has_initial_state: (sequences); whether there are any before it.
        cache_indices: (sequences); their slots.
        query_start_loc: (sequences + 1).
        seq_lens_cpu: not needed.

    Returns:
        (channels, tokens).
    """
    assert activation == "silu"
    width = weights.shape[1]
    outputs = torch.empty_like(inputs)
    bounds = pairwise(query_start_loc.tolist())
    for slot, goes_on, (start, end) in zip(
        cache_indices.tolist(), has_initial_state.tolist(), bounds, strict=True
    ):
        past = conv_states[slot].to(inputs.dtype) * goes_on
        extended = torch.cat([past, inputs[:, start:end]], dim=1)
        sums = (extended.unfold(1, width, 1) * weights[:, None]).sum(-1)
        outputs[:, start:end] = silu(sums if bias is None else sums + bias[:, None])
        conv_states[slot] = extended[:, 1 - width :]
    return outputs


def causal_conv1d_update_cpu(
    inputs: torch.Tensor,
    conv_states: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """The same for the next token of each sequence, all of which have a past: (sequences,
    channels), to the same shape."""
    count = len(inputs)
    past, bounds = torch.ones(count, dtype=torch.bool), torch.arange(count + 1)
    return causal_conv1d_fn_cpu(
        inputs.T,
        weights,
        bias,
        activation,
        conv_states,
        past,
        conv_state_indices,
        bounds,
        [1] * count,
    ).T.contiguous()


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay, g = -exp(A_log) softplus(a + dt_bias), and the rate of writing,
    beta = sigmoid(b).

    Args:
        A_log: (value heads), as `dt_bias`.
        a: (tokens, value heads), as `b`.
        b: see above.
        dt_bias: see above.

    Returns:
        g and beta, each (1, tokens, value heads).
    """
    return (-A_log.exp() * softplus(a.float() + dt_bias))[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """S_t = exp(g_t) S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, and o_t = S_t q_t (equation
    10), with k of length 1 and q of 1 / sqrt(key width).

    Args:
        q: (1, tokens, key heads, key width), as `k`; a key head serves as many value heads as there
            are of them to each.
        k: see above.
        v: (1, tokens, value heads, value width).
        g: (1, tokens, value heads), as `beta`.
        beta: see above.
        initial_state: (slots, value heads, value width, key width); the states before each
            sequence, which those at its end replace.
        cu_seqlens: (sequences + 1); where they begin and end in the tokens.
        head_first: no.
        use_qk_l2norm_in_kernel: yes.
        initial_state_indices: (sequences); their slots.

    Returns:
        o, of the shape of `v`; the states at the ends; and, where other kernels have states in
        between, nothing.
    """
    assert use_qk_l2norm_in_kernel
    assert not head_first
    share = v.shape[2] // k.shape[2]
    queries, keys = (
        _of_length_one(heads[0].float()).repeat_interleave(share, dim=1) for heads in (q, k)
    )
    queries = queries * q.shape[-1] ** -0.5
    outputs = torch.empty_like(v)
    for slot, (start, end) in zip(
        initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=True
    ):
        state = initial_state[slot].float()
        for token in range(start, end):
            key, rate = keys[token, :, None], beta[0, token, :, None, None]
            state = state * g[0, token, :, None, None].exp()
            # What is written is what the state does not tell of this key yet.
            state = state + rate * (v[0, token, :, :, None].float() - state @ key.mT) * key
            outputs[0, token] = (state @ queries[token, :, :, None])[..., 0]
        initial_state[slot] = state
    return outputs, initial_state[initial_state_indices], None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Gates and delta rule for the next token of each sequence; shapes are those of the two, with a
    sequence for each token."""
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    outputs, *_ = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
    )
    return outputs


def fused_rmsnorm_gated_cpu(
    inputs: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """Root mean square normalization (arXiv:1910.07467), times silu(gate): (rows, width), to the
    same shape."""
    return _normalized(inputs, eps) * weight * silu(gate)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of each head, (tokens, heads * width) to (tokens * heads, width); Gemma's weights
    are the differences from 1."""
    return (
        _normalized(q.reshape(-1, head_width), eps) * (1 + q_weight),
        _normalized(k.reshape(-1, head_width), eps) * (1 + k_weight),
    )


def _normalized(rows: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()


def _of_length_one(rows: torch.Tensor) -> torch.Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
