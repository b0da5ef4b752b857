"""The sides of `field.py`: one of them in this process, in the environment of its engine, doing what
the benchmark asks for.

Each has memory of 128 pages that its engine made. The limit is here, and has a mapping of its own.
`write` and `read` move the first pages of the memory; `announce` makes the engine's own names of
keys, which it has anyway; `forget` makes the memory that a read fills zero, and `is_sound` compares
what was read with what was written.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interleaved import serve_side

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGES = 128
"""Of the memory of each side."""
LIMIT, FILE, HF3FS_SERVER = "limit", "file", "hf3fs, server"
TIER, ADAPTER = "vLLM `HiCacheTier`", "LMCache `HiCacheL2Adapter`"
HICACHE_FILE, NIXL = "SGLang `HiCacheFile`", "SGLang NIXL POSIX"
SGLANG_HF3FS, SGLANG_HF3FS_SERVER = "SGLang hf3fs (mock)", "SGLang hf3fs (mock), server"
VLLM_FS, LMCACHE_FS = "vLLM `fs`", "LMCache `fs_native`"
ON_VLLM, ON_LMCACHE = (TIER, VLLM_FS), (ADAPTER, LMCACHE_FS)


@dataclass(frozen=True)
class Setup:
    """How a side is made."""

    name: str
    directory: Path
    """What all its files are in; not there yet."""
    page_bytes: int
    callers: int
    """Threads that share the pages of a call, or jobs that are given at once."""
    url: str
    """Of its metadata server, if it has one."""
    layout: str
    """Of SGLang's host pool."""
    direct: bool
    """Past the page cache."""
    threads: int
    """Of the limit."""


class Limit:
    """`pwritev` into new files, `preadv` from them, one call for each thread, and nothing else.

    Each thread has a file: two threads that write one file wait for each other.
    """

    def __init__(self, setup: Setup) -> None:
        setup.directory.mkdir(parents=True)
        self._files = [setup.directory / str(number) for number in range(setup.threads)]
        self._page_bytes, self._threads = setup.page_bytes, ThreadPoolExecutor(setup.threads)
        self._direct = os.O_DIRECT if setup.direct else 0
        memory = mmap.mmap(-1, PAGES * setup.page_bytes)
        # Of all kinds of memory that the sides have, the one that is filled fastest.
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(memory)
        self._memory[:] = os.urandom(PAGES * setup.page_bytes)
        self._written = bytes(self._memory)

    def announce(self, keys: list[str]) -> None:
        pass

    def write(self, keys: list[str]) -> bool:
        return self._move(len(keys), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.pwritev)

    def read(self, keys: list[str]) -> bool:
        return self._move(len(keys), os.O_RDONLY, os.preadv)

    def exists(self, keys: list[str]) -> int:
        raise NotImplementedError("the limit has no keys")

    def forget(self, pages: int) -> None:
        self._memory[: pages * self._page_bytes] = bytes(pages * self._page_bytes)

    def is_sound(self, pages: int) -> bool:
        length = pages * self._page_bytes
        return self._memory[:length] == self._written[:length]

    def remove(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        self._threads.shutdown()
        self.remove()

    def _move(
        self, pages: int, flags: int, call: Callable[[int, list[memoryview], int], int]
    ) -> bool:
        share = pages // len(self._files) * self._page_bytes

        def move(number: int) -> bool:
            descriptor = os.open(self._files[number], flags | self._direct)
            try:
                return call(descriptor, [self._memory[number * share :][:share]], 0) == share
            finally:
                os.close(descriptor)

        return all(self._threads.map(move, range(len(self._files))))


def made(setup: Setup) -> Any:
    """Make a side, with the memory of its engine."""
    if setup.name == LIMIT:
        return Limit(setup)
    if setup.name in (*ON_VLLM, *ON_LMCACHE):
        import field_engines

        return field_engines.made(setup)
    import field_sglang

    return field_sglang.SIDES[setup.name](setup)


def serve(descriptor: int) -> None:
    """Be a side until it is closed."""
    serve_side(descriptor, made)
