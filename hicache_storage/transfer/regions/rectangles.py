"""Copies between tensors with gaps, as rectangles.

Rows of adjacent bytes at one distance from each other.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

MAX_PITCH = (1 << 31) - 1
"""CUDA refuses rows that begin further apart, in bytes."""


class Rectangle(NamedTuple):
    """`height` rows of `width` bytes, from an address on either side.

    `pitch` bytes from one row to the next.
    """

    destination: int
    destination_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


class Axis(NamedTuple):
    """Steps at one distance on either side."""

    steps: int
    to: int
    """Bytes from one step to the next in the destination."""
    origin: int
    """The same in the source."""


def rectangles(destination: torch.Tensor, source: torch.Tensor) -> Iterator[Rectangle]:
    """Split a copy between two tensors of one shape and element type into rectangles.

    One, if possible.
    """
    axes = common_axes(destination, source)
    width = destination.element_size()
    if axes and axes[-1].to == axes[-1].origin == width:
        width *= axes.pop().steps
    # The longest axis becomes the rectangle's rows: that leaves the fewest calls.
    height = max(
        (axis for axis in axes if _is_pitch(axis, width)), key=lambda axis: axis.steps, default=None
    )
    if height is not None:
        axes.remove(height)
    rows = height or Axis(1, width, width)
    for place in product(*(range(axis.steps) for axis in axes)):
        to = sum(step * axis.to for step, axis in zip(place, axes, strict=True))
        origin = sum(step * axis.origin for step, axis in zip(place, axes, strict=True))
        yield Rectangle(
            destination.data_ptr() + to,
            rows.to,
            source.data_ptr() + origin,
            rows.origin,
            width,
            rows.steps,
        )


def common_axes(destination: torch.Tensor, source: torch.Tensor) -> list[Axis]:
    """Return the tensors' common axes from the outermost to the innermost.

    Those are joined that are one on both sides.
    """
    size = destination.element_size()
    strides = zip(destination.shape, destination.stride(), source.stride(), strict=True)
    joined: list[Axis] = []
    for axis in sorted(
        # Axes of one step are left out: their strides may be anything.
        (Axis(steps, to * size, origin * size) for steps, to, origin in strides if steps > 1),
        key=_reach,
    ):
        last = joined[-1] if joined else None
        if last is not None and (last.to, last.origin) == (
            axis.steps * axis.to,
            axis.steps * axis.origin,
        ):
            joined[-1] = Axis(last.steps * axis.steps, axis.to, axis.origin)
        else:
            joined.append(axis)
    return joined


def _reach(axis: Axis) -> tuple[int, int]:
    return -axis.to, -axis.origin


def _is_pitch(axis: Axis, width: int) -> bool:
    return all(width <= pitch <= MAX_PITCH for pitch in (axis.to, axis.origin))
