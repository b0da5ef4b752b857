"""The row kernel: compiled by NVRTC for the GPU that is there, and launched with prepared arguments."""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hicache_storage.spec import InvalidPoolError
from hicache_storage.transfer.cuda.driver import address, driver, launch, memcpy_batch, nvidia
from hicache_storage.transfer.plan import MAX_PART_WORDS, geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.transfer.streams import RowSide

SOURCE: Final = Path(__file__).with_name("rows.cu")
BUS_BLOCKS: Final = 8
"""Multiprocessors of a kernel that reads or writes host memory: more are no faster."""
DEVICE_BLOCKS: Final = 32
"""Multiprocessors of a kernel that gathers or scatters on the device."""


class _Side(ctypes.Structure):
    """`Side` of rows.cu."""

    _fields_ = [(name, ctypes.c_int64) for name in ("parts", "pages", "page", "outer", "inner")]


class Move(ctypes.Structure):
    """`Move` of rows.cu."""

    _fields_ = [
        *((name, _Side) for name in ("to", "origin")),
        *((name, ctypes.c_uint32) for name in ("parts", "pages", "outer", "inner", "width")),
    ]


class CudaRowCopy:
    """A prepared kernel; see `Device.row_copy`.

    Args:
        sides: where it writes, and where it reads.
        rows: addresses of the rows of page numbers of the next launch.
        device: where it runs, with its number.
    """

    def __init__(
        self,
        sides: tuple[RowSide, RowSide],
        rows: Sequence[int],
        device: torch.device,
    ) -> None:
        self._rows = rows
        # A staging buffer's pages have no numbers.
        is_staged = any(side.row is None for side in sides)
        self._blocks = DEVICE_BLOCKS if is_staged else BUS_BLOCKS
        addresses = [[address(view) for view in side.views] for side in sides]
        self.move, word = make_move(sides, addresses)
        major, minor = torch.cuda.get_device_capability(device)
        self._function = kernel(f"sm_{major}{minor}", word)
        # Both tables in one: int64 for the parts of either side.
        self._tables = torch.tensor(addresses, device=device)
        self._sides = [
            (arguments, table.data_ptr(), side.row)
            for arguments, table, side in zip(
                (self.move.to, self.move.origin), self._tables, sides, strict=True
            )
        ]
        # `void**`: the addresses of the arguments, of which there is one.
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.move))

    def launch(self, stream: int, parts: range, pages: range) -> int:
        """Enqueue it for some parts and pages; returns CUDA's error."""
        for arguments, table, row in self._sides:
            arguments.parts = table + 8 * parts.start
            arguments.pages = 0 if row is None else self._rows[row] + 8 * pages.start
        self.move.parts = len(parts)
        self.move.pages = len(pages)
        return launch(self._function, self._blocks, stream, ctypes.addressof(self._arguments))


def make_move(
    sides: tuple[RowSide, RowSide], addresses: Sequence[Sequence[int]]
) -> tuple[Move, int]:
    """The arguments of a kernel but for its parts and pages, and the bytes of a word.

    Raises:
        InvalidPoolError: pages have gaps that it does not know, or differ, or are too many.
    """
    shape, *others = {
        geometry(*views) for views in zip(*(side.views for side in sides), strict=True)
    }
    pages = max(side.views[0].shape[0] for side in sides)
    (outer, *outer_steps), (inner, *inner_steps) = shape.outer, shape.inner
    starts = [start for each in addresses for start in each]
    # All pieces consist of such words, and begin at them.
    word = math.gcd(16, shape.width, *shape.pitches, *outer_steps, *inner_steps, *starts)
    if others or pages * shape.bytes // word >= MAX_PART_WORDS:
        raise InvalidPoolError(
            f"layers must have the same strides, and less than {MAX_PART_WORDS * word} bytes; got "
            f"{[shape, *others]} and {pages} pages"
        )
    to, origin = (
        _Side(0, 0, *steps) for steps in zip(shape.pitches, outer_steps, inner_steps, strict=True)
    )
    return Move(to, origin, 0, 0, outer, inner, shape.width // word), word


@functools.cache
def compiled(arch: str) -> Any:
    """The kernel for an architecture such as `sm_90`: from the disk, or compiled in 0.2 to 0.4 s.

    It is kept in cuda.core's folder (`~/.cache/cuda-python`) by source, architecture and version
    of NVRTC.

    Raises:
        ConfigError: NVRTC or cuda-core is missing.
    """
    with nvidia():
        core, utils = map(importlib.import_module, ("cuda.core", "cuda.core.utils"))
        options = core.ProgramOptions(arch=arch, std="c++17", name=SOURCE.name)
        program = core.Program(SOURCE.read_text(), "c++", options)
        try:
            return program.compile("cubin", cache=utils.FileStreamProgramCache())
        except OSError:
            # No folder that can be written to: compiled by each process.
            return program.compile("cubin")


@functools.cache
def kernel(arch: str, word: int) -> Any:
    """The kernel that moves words of so many bytes, as the driver launches it."""
    # Refuses an old driver here, where an engine is made.
    memcpy_batch()
    return driver().CUfunction(int(compiled(arch).get_kernel(f"rows{word}").handle))
