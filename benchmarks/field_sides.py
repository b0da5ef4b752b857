"""The sides of `field.py`: one of them in this process, in the environment of its engine, doing what
the benchmark asks for.

Each has memory of 128 pages that its engine made. `file`, `hf3fs` and SGLang's have SGLang's host
pool and are called by as many threads as there are callers. vLLM's tier and LMCache's adapter have
their engine's memory and are given as many jobs at once. The limit has a mapping of its own.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))

from checkouts import Timed

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES = 128
"""Of the memory of each side."""
LIMIT, FILE, HF3FS, HF3FS_SERVER = "limit", "file", "hf3fs, local map", "hf3fs, server"
HICACHE_FILE, SGLANG_HF3FS, NIXL = (
    "SGLang `HiCacheFile`",
    "SGLang hf3fs (mock)",
    "SGLang NIXL POSIX",
)
VLLM_FS, LMCACHE_FS = "vLLM `fs`", "LMCache `fs_native`"


class Side(Protocol):
    """One of those who are compared; `write` and `read` move the first pages of its memory."""

    def announce(self, keys: list[str]) -> None:
        """Make the engine's own names of keys, which it has anyway."""

    def write(self, keys: list[str]) -> bool: ...
    def read(self, keys: list[str]) -> bool: ...
    def exists(self, keys: list[str]) -> int: ...
    def forget(self, pages: int) -> None:
        """Make the memory that a read fills zero."""

    def is_sound(self, pages: int) -> bool:
        """Compare what was read with what was written."""
        ...

    def remove(self) -> None: ...
    def files(self) -> list[Path]: ...
    def close(self) -> None: ...


class Limit:
    """`pwritev` into new files, `preadv` from them, one call for each thread, and nothing else.

    Args:
        directory: where the files are made, one for each thread: two threads that write one file
            wait for each other.
        page_bytes: length of a page.
        threads: share the pages of a call.
        direct: with O_DIRECT.
    """

    def __init__(self, directory: Path, page_bytes: int, threads: int, *, direct: bool) -> None:
        directory.mkdir(parents=True)
        self._files = [directory / str(number) for number in range(threads)]
        self._page_bytes, self._threads = page_bytes, ThreadPoolExecutor(threads)
        self._direct = os.O_DIRECT if direct else 0
        memory = mmap.mmap(-1, PAGES * page_bytes)
        # Of all kinds of memory that the sides have, the one that is filled fastest.
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(memory)
        self._memory[:] = os.urandom(PAGES * page_bytes)
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


class Called:
    """A candidate on SGLang's host pool, called by threads that share the pages.

    Args:
        candidate: of `sglang_peer` or `hf3fs_candidates`, or NIXL.
        pool: its host pool.
        directory: what all its files are in.
        callers: number of threads; with one, the calling thread itself.
    """

    def __init__(self, candidate: Any, pool: Any, directory: Path, callers: int) -> None:
        import torch

        self._candidate, self._directory, self._callers = candidate, directory, callers
        # `forget` and `is_sound` would leave threads of OpenMP that spin for milliseconds, on the
        # core on which a side wakes a thread.
        torch.set_num_threads(1)
        self._memory = pool.kv_buffer.view(torch.uint8)
        # `page_first`: tokens are the second dimension, behind keys and values.
        self._tokens = self._memory.shape[1] // PAGES
        self._written = self._memory.clone()
        self._threads = ThreadPoolExecutor(callers)

    def announce(self, keys: list[str]) -> None:
        pass

    def write(self, keys: list[str]) -> bool:
        return self._share(keys, self._candidate.write)

    def read(self, keys: list[str]) -> bool:
        return self._share(keys, self._candidate.read)

    def exists(self, keys: list[str]) -> int:
        return int(self._candidate.exists(keys))

    def forget(self, pages: int) -> None:
        self._memory[:, : pages * self._tokens] = 0

    def is_sound(self, pages: int) -> bool:
        tokens = pages * self._tokens
        return bool((self._memory[:, :tokens] == self._written[:, :tokens]).all())

    def remove(self) -> None:
        self._candidate.remove()

    def files(self) -> list[Path]:
        return [path for path in self._directory.rglob("*") if path.is_file()]

    def close(self) -> None:
        self._threads.shutdown()
        self._candidate.close()

    def _share(self, keys: list[str], call: Callable[[list[str], int], object]) -> bool:
        if self._callers == 1:
            return bool(call(keys, 0))
        share = len(keys) // self._callers
        starts = range(0, len(keys), share)
        return all(
            self._threads.map(lambda first: call(keys[first : first + share], first), starts)
        )


class Jobs:
    """A tier of vLLM or an adapter of LMCache; it reads into another half of its memory."""

    def __init__(self, candidate: Any, memory: Any) -> None:
        self._candidate, self._memory = candidate, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._candidate, name)

    def forget(self, pages: int) -> None:
        """Do nothing: `is_sound` has made it zero."""

    def close(self) -> None:
        self._candidate.close()
        self._memory.close()


class Nixl:
    """SGLang's `HiCacheNixl` with the POSIX plug-in, in zero copy; its own default is O_DIRECT."""

    def __init__(self, pool: Any, directory: Path, *, direct: bool) -> None:
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl
        from sglang_peer import storage_config

        directory.mkdir(parents=True)
        config = storage_config(
            plugin={"posix": {"active": True}}, l3_cleaner_enabled=False, use_direct_io=direct
        )
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = str(directory)
        self._storage = HiCacheNixl(config)
        self._storage.register_mem_pool_host(pool)

    def write(self, keys: list[str], first: int = 0) -> bool:
        from sglang_peer import indices

        return all(self._storage.batch_set_v1(keys, indices(keys, first)))

    def read(self, keys: list[str], first: int = 0) -> bool:
        from sglang_peer import indices

        return all(self._storage.batch_get_v1(keys, indices(keys, first)))

    def exists(self, keys: list[str]) -> int:
        return int(self._storage.batch_exists(keys))

    def remove(self) -> None:
        self._storage.clear()

    def close(self) -> None:
        self._storage.close()


def made(
    name: str,
    directory: Path,
    page_bytes: int,
    callers: int,
    url: str,
    *,
    direct: bool,
    threads: int,
) -> Side:
    """Make a side, with the memory of its engine."""
    if name == LIMIT:
        return Limit(directory, page_bytes, threads, direct=direct)
    if name in (VLLM_FS, LMCACHE_FS):
        import tier_candidates as tiers

        engine = tiers.VLLM if name == VLLM_FS else tiers.LMCACHE
        memory = tiers.host_pool(page_bytes, engine)
        side = tiers.Side(directory, name, callers, direct)
        make = tiers.vllm_fs if name == VLLM_FS else tiers.lmcache_fs_native
        return Jobs(make(memory, side), memory)
    import sglang_peer

    pool = sglang_peer.host_pool(page_bytes)
    if name == HICACHE_FILE:
        return Called(sglang_peer.Peer(pool, directory), pool, directory, callers)
    if name == FILE:
        ours = sglang_peer.Ours(pool, directory, direct_io=direct)
        return Called(ours, pool, directory, callers)
    if name == NIXL:
        return Called(Nixl(pool, directory, direct=direct), pool, directory, callers)
    import hf3fs_candidates as hf3fs

    directory.mkdir(parents=True)
    candidate = (
        hf3fs.Peer(pool, directory, page_bytes, None, jobs=16, entries=8)
        if name == SGLANG_HF3FS
        else hf3fs.Ours(pool, directory, page_bytes, url or None)
    )
    candidate.prepare()
    return Called(candidate, pool, directory, callers)


def serve(connection: Connection) -> None:
    """Make the side that is asked for, and do what is asked until it is closed."""
    arguments, options = connection.recv()
    side = made(*arguments, **options)
    connection.send("")
    # Engines call from threads of their own; some of SGLang's drivers can be made in the main thread
    # only.
    caller = threading.Thread(target=_answer_calls, args=(connection, side))
    caller.start()
    caller.join()


def _answer_calls(connection: Connection, side: Side) -> None:
    method = ""
    while method != "close":
        method, arguments = connection.recv()
        started, cpu = time.perf_counter(), time.process_time()
        answer = getattr(side, method)(*arguments)
        connection.send(Timed(answer, time.perf_counter() - started, time.process_time() - cpu))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
