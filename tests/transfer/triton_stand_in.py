"""As much of Triton as our kernel uses, run by the CPU block by block: for machines without Triton.

Every access is checked: a kernel that leaves a tensor's memory is an IndexError here.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch

MODULE = "hicache_storage.transfer.cuda.row_kernel"


class Pointers:
    """Addresses within a tensor's memory, counted in its elements."""

    def __init__(self, tensor, offsets):
        self.tensor, self.offsets = tensor, offsets

    def __add__(self, offsets):
        return Pointers(self.tensor, self.offsets + offsets)

    def flat(self, mask):
        memory = torch.empty(0, dtype=self.tensor.dtype).set_(self.tensor.untyped_storage())
        places = torch.as_tensor(self.offsets) + self.tensor.storage_offset()
        wanted = (
            places
            if mask is None
            else torch.broadcast_to(places, torch.broadcast_shapes(places.shape, mask.shape))[mask]
        )
        if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(memory):
            raise IndexError("a kernel leaves the memory of its tensor")
        return memory, wanted


class Language(ModuleType):
    """`triton.language`."""

    constexpr = int

    def __init__(self):
        super().__init__("triton.language")
        self.block, self.blocks = 0, 1

    def program_id(self, axis):
        return self.block

    def num_programs(self, axis):
        return self.blocks

    def cdiv(self, number, divisor):
        return -(-number // divisor)

    def arange(self, start, end):
        return torch.arange(start, end)

    def load(self, pointers, mask=None, other=0):
        memory, places = pointers.flat(mask)
        if mask is None:
            return memory[places]
        shape = torch.broadcast_shapes(torch.as_tensor(pointers.offsets).shape, mask.shape)
        values = torch.full(shape, other, dtype=memory.dtype)
        values[mask.expand(shape)] = memory[places]
        return values

    def store(self, pointers, values, mask):
        memory, places = pointers.flat(mask)
        memory[places] = values[mask]


class Kernel:
    """Replacement for the result of `triton.jit`."""

    def __init__(self, function, language):
        self._function, self._language = function, language

    def __getitem__(self, grid):
        def run(*arguments, num_warps, **constants):
            assert all(value & (value - 1) == 0 for value in constants.values()), (
                "tiles are powers of two"
            )
            pointers = [
                Pointers(each, 0) if isinstance(each, torch.Tensor) else each for each in arguments
            ]
            self._language.blocks = grid[0]
            for block in range(grid[0]):
                self._language.block = block
                self._function(*pointers, **constants)

        return run


@contextmanager
def triton_on_the_cpu():
    """The module of the kernel, imported upon this."""
    triton, language = ModuleType("triton"), Language()
    triton.language = language
    triton.jit = lambda **options: lambda function: Kernel(function, language)
    with patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        sys.modules.pop(MODULE, None)
        yield importlib.import_module(MODULE)
