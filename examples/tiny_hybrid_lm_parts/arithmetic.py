"""Arithmetic of the models: independent of batching bit by bit, or with torch's own kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import pad

PAGE = 16
"""Tokens whose products are added as a tree."""


class Arithmetic(Protocol):
    """Sums of products; everything else in the models is element by element."""

    def project(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(..., in) times (out, in): (..., out)."""
        ...

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """The values that queries look at, weighted.

        Args:
            queries: (tokens, heads, dim).
            keys: (length, heads, dim), from the first token of the sequence on; values with a dim
                of their own.
            visible: (tokens, length), which keys a query may look at; at least one each.

        Returns:
            (tokens, heads, dim of the values).
        """
        ...


class OrderedArithmetic:
    """Bitwise the same for a token whatever is computed beside it, before it or in the same call.

    Matrix kernels and reductions choose the order of their additions by shape, alignment and number
    of threads, and vector units compute exp otherwise than the scalar code that does the rest of a
    row. So there are none here. Only additions, multiplications, divisions and square roots are
    used, element by element, which IEEE 754 rounds correctly everywhere; and every sum has an order
    that depends on places in the sequence and in the row alone: halves within a row or a page of
    tokens, then page after page. Keys that are not visible, and the padding to whole pages, add a
    zero to a sum that begins with zero, which changes nothing.
    """

    def project(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return total(rows.unsqueeze(-2) * weight)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        scores = total(queries.unsqueeze(2) * keys.transpose(0, 1)) * queries.shape[-1] ** -0.5
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        weights = _falling(scores - scores.amax(-1, keepdim=True))
        padding = -len(keys) % PAGE
        weights = pad(weights, (0, padding)).unsqueeze(-1)
        products = weights * pad(values.transpose(0, 1), (0, 0, 0, padding))
        return _over_tokens(products) / _over_tokens(weights)


class NativeArithmetic:
    """torch's own kernels. What they give depends on the shape of the call, within rounding."""

    def project(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight.T

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.einsum("thd,lhd->thl", queries, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("thl,lhd->thd", weights, values)


def total(rows: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, a power of two long, by adding halves."""
    while (length := rows.shape[-1]) > 1:
        rows = rows[..., : length // 2] + rows[..., length // 2 :]
    return rows[..., 0]


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """Rows over their root mean square."""
    return rows / (total(rows * rows) * (1 / rows.shape[-1]) + 1e-5).sqrt().unsqueeze(-1)


def gated(values: torch.Tensor) -> torch.Tensor:
    """A soft rectifier without exp."""
    return values * (values / (values.abs() + 1) + 1) * 0.5


def positive(values: torch.Tensor) -> torch.Tensor:
    """A soft plus without exp."""
    return (values + (values * values + 1).sqrt()) * 0.5


def _falling(values: torch.Tensor) -> torch.Tensor:
    """(1 + x/16)**16 for x from -16 to 0, like exp; 0 below."""
    base = (values * (1 / 16) + 1).clamp(min=0)
    for _ in range(4):
        base = base * base
    return base


def _over_tokens(products: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, length, dim), whole pages of keys long, to (tokens, heads, dim)."""
    heads, length, dim = products.shape[1:]
    pages = total(products.view(-1, heads, length // PAGE, PAGE, dim).transpose(-1, -2))
    result = torch.zeros_like(pages[..., 0, :])
    for page in pages.unbind(-2):
        result = result + page
    return result
