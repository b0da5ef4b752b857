"""SGLang's `HiCacheHF3FS` and this project's 3FS driver on the same SGLang host pool, both on files
of a plain file system."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import signal
import time
from typing import TYPE_CHECKING

import torch
from interleaved import fresh_keys
from sglang_peer import (
    BATCH_PAGES,
    PAGE_TOKENS,
    Calls,
    host_pool,  # noqa: F401 - for `checkouts`
    indices,
)

from hicache_storage import StorageIdentity, create_storage
from hicache_storage.layers import innermost

with contextlib.redirect_stderr(io.StringIO()):
    from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import (
        Hf3fsGlobalMetadataClient,
        Hf3fsLocalMetadataClient,
    )
    from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

if TYPE_CHECKING:
    from pathlib import Path

    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

PEER, OURS = "HiCacheHF3FS", "hicache hf3fs"
ZERO_COPY, STAGED = "page_first", "layer_first"
FILE_BATCHES = 4
QUARANTINE_SECONDS = 0.05
# The server keeps the number of pages that a rank has named first, so that each store is a rank of
# its own.
_ranks = itertools.count()


class Candidate:
    """One of the two, on some pages of a host pool."""

    name: str

    def __init__(self, pool: MHATokenToKVPoolHost) -> None:
        self.pool = pool

    def write(self, keys: list[str], first: int = 0) -> bool:
        raise NotImplementedError

    def read(self, keys: list[str], first: int = 0) -> bool:
        raise NotImplementedError

    def exists(self, keys: list[str]) -> int:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Write all of the file once, and see that what comes back is what went out."""
        written = [fresh_keys(BATCH_PAGES) for _ in range(FILE_BATCHES)]
        if not all(self.write(keys) for keys in written):
            raise AssertionError(f"{self.name} does not hold {FILE_BATCHES} batches")
        firsts = range(0, BATCH_PAGES * PAGE_TOKENS, PAGE_TOKENS)
        before = [self.pool.get_data_page(first).clone() for first in firsts]
        self.pool.kv_buffer.zero_()
        there = self.read(written[-1])
        after = [self.pool.get_data_page(first) for first in firsts]
        if not there or not all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(before, after, strict=True)
        ):
            raise AssertionError(f"{self.name} does not give back what it was given")
        self.remove()


class Peer(Candidate):
    """SGLang's driver, called as `HiCacheController` calls it."""

    name = PEER

    def __init__(
        self,
        pool: MHATokenToKVPoolHost,
        directory: Path,
        page_bytes: int,
        url: str | None,
        *,
        jobs: int,
        entries: int,
    ) -> None:
        super().__init__(pool)
        handlers = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
        }
        zero_copy = pool.layout == ZERO_COPY
        self.storage = HiCacheHF3FS(
            rank=next(_ranks),
            file_path=str(directory / "peer.bin"),
            file_size=FILE_BATCHES * BATCH_PAGES * page_bytes,
            numjobs=jobs,
            bytes_per_page=page_bytes // 2 if zero_copy else page_bytes,
            entries=entries,
            client_timeout=5,
            dtype=pool.dtype,
            metadata_client=Hf3fsGlobalMetadataClient(url) if url else Hf3fsLocalMetadataClient(),
            is_page_first_layout=zero_copy,
            use_mock_client=True,
        )
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.storage.register_mem_pool_host(pool)

    def write(self, keys: list[str], first: int = 0) -> bool:
        return all(self.storage.batch_set_v1(keys, indices(keys, first)))

    def read(self, keys: list[str], first: int = 0) -> bool:
        return all(self.storage.batch_get_v1(keys, indices(keys, first)))

    def exists(self, keys: list[str]) -> int:
        return self.storage.batch_exists(keys)

    def remove(self) -> None:
        self.storage.clear()

    def close(self) -> None:
        self.storage.close()


class Ours(Calls, Candidate):
    """The 3FS driver through the whole stack: metrics, deadline, circuit breaker, v2 calls,
    checksums."""

    name = OURS

    def __init__(
        self, pool: MHATokenToKVPoolHost, directory: Path, page_bytes: int, url: str | None
    ) -> None:
        super().__init__(pool)
        identity = StorageIdentity(
            model="benchmark", kv_dtype="bfloat16", page_size=PAGE_TOKENS, layout=pool.layout
        )
        # A page and its envelope end on a block.
        options = {
            "path": str(directory / "ours"),
            "file_size": FILE_BATCHES * BATCH_PAGES * (page_bytes + 4096),
            "engine": "posix",
        }
        more = {"metadata_url": url} if url else {"quarantine_seconds": QUARANTINE_SECONDS}
        self.storage = create_storage("hf3fs", identity, {**options, **more})
        self.storage.register_mem_host_pool_v2(pool, "kv")
        self.storage.open()

    def remove(self) -> None:
        innermost(self.storage).clear()
        # Until then its slots rest.
        time.sleep(2 * QUARANTINE_SECONDS)

    def close(self) -> None:
        self.storage.close()


# Importing SGLang's server sets up logging for it.
logging.getLogger().setLevel(logging.WARNING)
