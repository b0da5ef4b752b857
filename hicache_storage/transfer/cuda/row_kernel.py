"""A Triton kernel that copies rows by their numbers, on a few of the GPU's multiprocessors.

Imported on machines that have Triton, which comes with torch for CUDA on Linux.
"""

# A kernel has no types for its arguments: Triton refuses annotations that it does not know.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from hicache_storage.spec import InvalidPoolError
from hicache_storage.transfer.regions.pieces import row_shape
from hicache_storage.transfer.regions.rows import as_words

if TYPE_CHECKING:
    import torch

TILE_WORDS: Final = 4096
"""Words that a block reads before it writes: 32 KiB, so that a few blocks keep a bus busy."""
WARPS: Final = 16
NO_AXIS: Final = (1, 0, 0)


# Another number of rows must not compile the kernel again.
@triton.jit(do_not_specialize=["count"])
def _copy_rows(  # type: ignore[no-untyped-def]
    destination,
    source,
    destination_rows,
    source_rows,
    count,
    pitch,
    source_pitch,
    outer,
    outer_to,
    outer_origin,
    inner,
    inner_to,
    inner_origin,
    width,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy `count` rows of `outer * inner` pieces of `width` words; all distances are in words."""
    in_row = outer * inner
    chunks = tl.cdiv(width, BLOCK)
    pieces = count * in_row
    # A loop over tiles in place of a block for each: the number of blocks is fixed, so that the
    # other multiprocessors stay with the model.
    for tile in range(tl.program_id(0), tl.cdiv(pieces, PIECES) * chunks, tl.num_programs(0)):
        piece = tile // chunks * PIECES + tl.arange(0, PIECES)
        is_piece = piece < pieces
        row = piece // in_row
        part = piece % in_row
        to = tl.load(destination_rows + row, mask=is_piece, other=0) * pitch
        to += part // inner * outer_to + part % inner * inner_to
        origin = tl.load(source_rows + row, mask=is_piece, other=0) * source_pitch
        origin += part // inner * outer_origin + part % inner * inner_origin
        column = tile % chunks * BLOCK + tl.arange(0, BLOCK)
        mask = is_piece[:, None] & (column < width)[None, :]
        words = tl.load(source + (origin[:, None] + column[None, :]), mask=mask)
        tl.store(destination + (to[:, None] + column[None, :]), words, mask=mask)


def launch(
    destination: torch.Tensor,
    destination_rows: torch.Tensor,
    source: torch.Tensor,
    source_rows: torch.Tensor,
    blocks: int,
) -> None:
    """Enqueue `destination[destination_rows[i]] = source[source_rows[i]]` on the current stream.

    Args:
        destination, source: as kernels see them; rows of one shape and element type.
        destination_rows, source_rows: int64 on the device, as many.
        blocks: multiprocessors that it occupies at most.

    Raises:
        InvalidPoolError: rows lie apart along more than two axes.
    """
    to, origin = as_words(destination, source)
    shape, size = row_shape(to, origin), to.element_size()
    if len(shape.axes) > 2:
        raise InvalidPoolError(
            f"rows with gaps along {len(shape.axes)} axes are not known to the kernel; pass "
            "another backend"
        )
    axes = [(axis.steps, axis.to // size, axis.origin // size) for axis in shape.axes]
    outer, inner = [NO_AXIS] * (2 - len(axes)) + axes
    width = shape.width // size
    # Ranges in Triton have powers of two as lengths.
    block = min(1 << (width - 1).bit_length(), TILE_WORDS)
    _copy_rows[(blocks,)](
        to,
        origin,
        destination_rows,
        source_rows,
        len(destination_rows),
        shape.pitch // size,
        shape.source_pitch // size,
        *outer,
        *inner,
        width,
        PIECES=TILE_WORDS // block,
        BLOCK=block,
        num_warps=WARPS,
    )
