"""The row kernel, compiled as C++ for machines without a GPU."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from hicache_storage.transfer.cuda.kernel import SOURCE

HERE = Path(__file__).parent


@functools.cache
def library():
    """`run(word bytes, blocks, threads, address of a Move)`."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "rows.so"
        options = [
            "-std=c++17",
            "-O2",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            "-Wno-unknown-pragmas",
        ]
        paths = ["-I", SOURCE.parent, HERE / "rows_on_cpu.cpp", "-o", built]
        subprocess.run(["g++", *options, *map(str, paths)], check=True)
        loaded = ctypes.CDLL(str(built))
    loaded.run.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
    loaded.run.restype = None
    return loaded


def launch(word, blocks, arguments, threads=32):
    """Run a kernel as `cuLaunchKernel` is called: with the address of its arguments' addresses."""
    library().run(word, blocks, threads, ctypes.c_void_p.from_address(arguments).value)
