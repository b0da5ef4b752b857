"""Rows with gaps as arrays of contiguous pieces.

One call of CUDA takes them, whatever their number.

torch is imported where it is used: the simulator, which shares modules with this, is imported on
machines without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.transfer.regions.rectangles import common_axes
from hicache_storage.transfer.regions.runs import Pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.transfer.regions.rectangles import Axis
    from hicache_storage.transfer.regions.runs import RowRuns


class RowShape(NamedTuple):
    """One row of two tensors: pieces of `width` adjacent bytes.

    Repeated along axes that lie apart on some side.
    """

    axes: Sequence[Axis]
    """From the outermost to the innermost."""
    width: int
    pitch: int
    """Bytes from one row of the destination to the next."""
    source_pitch: int

    @property
    def is_joined(self) -> bool:
        """Return True if adjacent rows are contiguous on both sides."""
        return not self.axes and self.width == self.pitch == self.source_pitch


def row_shape(destination: torch.Tensor, source: torch.Tensor) -> RowShape:
    """Return the pieces that a row consists of.

    The two tensors have rows of one shape and element type.
    """
    size = destination.element_size()
    axes, width = common_axes(destination[0], source[0]), size
    if axes and axes[-1].to == axes[-1].origin == width:
        width *= axes.pop().steps
    return RowShape(axes, width, destination.stride(0) * size, source.stride(0) * size)


def pieces_of(destination: torch.Tensor, source: torch.Tensor, rows: RowRuns) -> Pieces:
    """The contiguous copies that bring rows of `source` to rows of `destination`.

    Vector arithmetic, done once for all layers of a pool: they differ in their addresses only.
    """
    # Without addresses: layers of a pool differ in nothing else, and share the result.
    key = (destination.shape[1:], destination.stride(), source.stride(), destination.element_size())
    if key not in rows.pieces:
        rows.pieces[key] = _pieces(row_shape(destination, source), rows)
    return rows.pieces[key]


def _pieces(shape: RowShape, rows: RowRuns) -> Pieces:
    if shape.is_joined:
        return Pieces(
            rows.destinations[rows.starts] * shape.pitch,
            rows.sources[rows.starts] * shape.source_pitch,
            rows.lengths * shape.width,
        )
    destinations = _spread(
        rows.destinations * shape.pitch, [(axis.steps, axis.to) for axis in shape.axes]
    )
    sources = _spread(
        rows.sources * shape.source_pitch, [(axis.steps, axis.origin) for axis in shape.axes]
    )
    return Pieces(destinations, sources, destinations.new_full(destinations.shape, shape.width))


def _spread(starts: torch.Tensor, axes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Every start, and what lies behind it by so many steps of so many bytes along each axis."""
    for steps, distance in axes:
        starts = (starts.unsqueeze(1) + starts.new_tensor(range(steps)) * distance).view(-1)
    return starts
