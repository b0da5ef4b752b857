"""Replay of request traces: hit rate, bytes and time of a driver, by capacity.

Formats, one JSON object a line, also compressed with gzip: Mooncake's of FAST'25 and what is
written in it elsewhere (`hash_ids`), the Bailian traces of Qwen (`hash_ids`), and Dynamo's
`dynamo.request.trace.v1` (`request.replay.input_sequence_hashes`).
"""

from __future__ import annotations

import gzip
import math
import secrets
import shutil
import time
from collections import OrderedDict
from contextlib import closing
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from hicache_storage.plugins import registry
from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    parse_bytes,
)
from hicache_storage.tools.bench.client import (
    BATCH_PAGES,
    PAGE_SIZE,
    BenchWorkload,
    Candidate,
    WrongAnswerError,
    make_pool,
    open_storage,
)
from hicache_storage.tools.options import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import torch

    from hicache_storage.spec import HiCacheStorage

SHARES: Final = (0.01, 0.03, 0.1, 0.3)
"""Capacities by default, of the bytes of a trace's distinct pages."""
REFERENCE: Final = "LRU"
"""Label of the store that results are compared with."""
DELETE_PAGES: Final = 4096
"""Pages deleted by one call."""
COLOURS: Final = ("#1668b8", "#c2570c")
_POSITIVE: Final = (1 << 63) - 1


class _Replay(msgspec.Struct):
    input_sequence_hashes: list[int | str]


class _Request(msgspec.Struct):
    replay: _Replay | None = None


class _Row(msgspec.Struct):
    hash_ids: list[int | str] | None = None
    request: _Request | None = None
    event: _Row | None = None

    def blocks(self) -> list[int | str] | None:
        """Return the blocks of the prompt; None for a record that is no request."""
        if self.event is not None:
            return self.event.blocks()
        replay = self.request.replay if self.request else None
        return replay.input_sequence_hashes if replay else self.hash_ids


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in their order, each the keys of the pages of its prompt.

    Args:
        keys: of all requests, shape `(pages,)`.
        ends: end of each request in `keys`, shape `(requests + 1,)`, the first 0.
    """

    keys: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        for start, end in pairwise(self.ends.tolist()):
            yield self.keys[start:end]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a trace.

        A key is computed from a block and all blocks before it: the Bailian traces hash each block
        by itself, and a page is found with its whole prefix only.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has another form.
        """
        decoder, keys, ends = msgspec.json.Decoder(_Row), list[int](), [0]
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    blocks = decoder.decode(line).blocks()
                except msgspec.MsgspecError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
                if blocks is None:
                    continue
                key = 0
                for block in blocks:
                    key = hash((key, block)) & _POSITIVE
                    keys.append(key)
                ends.append(len(keys))
        if not keys:
            raise ValueError(
                f"{path} has no request with blocks; known are `hash_ids` (Mooncake, Bailian) and "
                "`request.replay.input_sequence_hashes` (Dynamo)"
            )
        return cls(np.array(keys, np.int64), np.array(ends, np.int64))

    def sampled(self, parts: int) -> Trace:
        """Return the references to one of so many pages, chosen by key.

        A store of as small a part of a capacity has the hit rate of the whole trace in the whole
        capacity, but for chance (Waldspurger et al., FAST'15).
        """
        kept = self.keys % parts == 0
        return Trace(self.keys[kept], np.concatenate([[0], np.cumsum(kept)])[self.ends])


@dataclass(slots=True)
class ReplayResult:
    """Result of one replay of a trace."""

    label: str
    """Driver, or `REFERENCE`."""
    capacity_bytes: int | None
    """None without a limit."""
    requests: int
    pages: int
    """Pages that the requests ask for."""
    hits: int = 0
    """Pages delivered: of each request, those before the first miss."""
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Part of the pages that were delivered, 0 to 1."""
        return self.hits / self.pages

    def scaled(self, parts: int, pages: int, page_bytes: int, capacity: int | None) -> ReplayResult:
        """Return the result of a whole trace, of which one of so many parts was replayed.

        The misses are scaled, and all other references are hits: a few pages, such as those of a
        system prompt, have many of the hits, and may or may not be in a sample (SHARDS-adj).
        """
        hits = max(0, pages - (self.pages - self.hits) * parts)
        return replace(
            self,
            capacity_bytes=capacity,
            pages=pages,
            hits=hits,
            read_bytes=hits * page_bytes,
            written_bytes=self.written_bytes * parts,
        )


def capacities_of(
    trace: Trace, driver: str, page_bytes: int, given: str | None
) -> Sequence[int | None]:
    """Return the capacities to replay a trace with, in bytes; None for a driver without a limit.

    By default some shares of the trace's distinct pages.

    Raises:
        ValueError: the driver has no option for a capacity, or one is no size.
    """
    if not registry().get(driver).capacity_option:
        if given is not None:
            raise ValueError(f"driver {driver!r} has no capacity; leave --capacity out")
        return [None]
    if given is not None:
        return sorted({parse_bytes(part) for part in given.split(",")})
    total = len(np.unique(trace.keys)) * page_bytes
    return sorted({max(page_bytes, int(share * total)) for share in SHARES})


def check_disk(trace: Trace, candidate: Candidate, page_bytes: int, capacity: int | None) -> None:
    """Check that the pages of a trace fit on the disk of a store that has a path.

    On a full disk the hit rates would be those of a smaller capacity.

    Raises:
        ValueError: they do not.
    """
    if "path" not in candidate.options:
        return
    path = Path(candidate.options["path"]).absolute()
    place = next(each for each in (path, *path.parents) if each.is_dir())
    total = len(np.unique(trace.keys)) * page_bytes
    needed = total if capacity is None else min(capacity, total)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{place} has {size_text(free)} free and {size_text(needed)} may be needed; give "
            "smaller --pages or a smaller --capacity"
        )


def replay(
    trace: Trace, candidate: Candidate, page_bytes: int, capacity: int | None
) -> ReplayResult:
    """Replay a trace as an engine would, as fast as the driver answers.

    Each request looks its pages up, reads those that are found, and stores the others. The pages
    are removed at the end.

    Args:
        capacity: of the store in bytes.

    Raises:
        WrongAnswerError: a page was delivered with other bytes.
        HiCacheError: the storage cannot be constructed or opened.
    """
    option = registry().get(candidate.driver).capacity_option
    options = dict(candidate.options)
    if option and capacity is not None:
        options[option] = f"{capacity}B"
    result = ReplayResult(candidate.driver, capacity, trace.requests, len(trace.keys))
    # Keys of its own: pages of an earlier replay would be hits.
    prefix = secrets.token_hex(8)
    with closing(open_storage(Candidate(candidate.driver, options))) as storage:
        try:
            caller = _Caller(storage, page_bytes, prefix)
            started = time.perf_counter()
            for keys in trace:
                caller.request(keys, result)
            result.seconds = time.perf_counter() - started
        finally:
            stored = [f"{prefix}{key:016x}" for key in np.unique(trace.keys).tolist()]
            for start in range(0, len(stored), DELETE_PAGES):
                storage.delete(stored[start : start + DELETE_PAGES])
    return result


def reference(trace: Trace, page_bytes: int, capacity: int | None) -> ReplayResult:
    """Compute the hits of an exact LRU store of this capacity, which evicts ends of prefixes first.

    Without a capacity: the pages that any store can deliver.
    """
    result = ReplayResult(REFERENCE, capacity, trace.requests, len(trace.keys))
    if capacity is None:
        # A key stands for all pages before it, too: each is missed once.
        misses = len(np.unique(trace.keys))
        result.hits = result.pages - misses
        result.read_bytes = result.hits * page_bytes
        result.written_bytes = misses * page_bytes
        return result
    limit, kept = capacity // page_bytes, OrderedDict[int, None]()
    for keys in trace:
        pages = keys.tolist()
        hits = next((at for at, key in enumerate(pages) if key not in kept), len(pages))
        result.hits += hits
        result.written_bytes += (len(pages) - hits) * page_bytes
        # The first page is the one used last.
        for key in reversed(pages):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > limit:
            kept.popitem(last=False)
    result.read_bytes = result.hits * page_bytes
    return result


class _Caller:
    """Calls of an engine, each of at most `BATCH_PAGES` pages. A page begins with its key."""

    def __init__(self, storage: HiCacheStorage, page_bytes: int, prefix: str) -> None:
        import torch

        self._storage = storage
        self._page_bytes = page_bytes
        self._prefix = prefix
        pool = make_pool(BenchWorkload(page_bytes, 1))
        storage.register_mem_host_pool_v2(pool, "kv")
        storage.on_host_pools_registered()
        # The first bytes of each page, as one number.
        self._stamps = pool.parts[0].numpy()[::PAGE_SIZE].reshape(2 * BATCH_PAGES, -1)[:, :8]
        self._slots: list[torch.Tensor] = [
            torch.arange(start * PAGE_SIZE, (start + BATCH_PAGES) * PAGE_SIZE)
            for start in (0, BATCH_PAGES)
        ]

    def request(self, keys: npt.NDArray[np.int64], result: ReplayResult) -> None:
        """Look up, read and store the pages of a prompt.

        Raises:
            WrongAnswerError: a page was delivered with other bytes.
        """
        if not len(keys):
            return
        names = [f"{self._prefix}{key:016x}" for key in keys.tolist()]
        found = self._storage.batch_exists_v2(names).kv_hit_pages
        hits = 0
        for start in range(0, found, BATCH_PAGES):
            wanted = names[start : min(found, start + BATCH_PAGES)]
            answer = self._storage.batch_get_v2([self._transfer(0, wanted)])[PoolName.KV]
            came = answer.index(False) if False in answer else len(answer)
            sent = self._stamps[:came].copy().view(np.int64)[:, 0]
            if not np.array_equal(sent, keys[start : start + came]):
                raise WrongAnswerError("a get answered True and delivered another page")
            hits += came
            if came < len(answer):
                break
        result.hits += hits
        result.read_bytes += hits * self._page_bytes
        for start in range(hits, len(names), BATCH_PAGES):
            new = names[start : start + BATCH_PAGES]
            self._stamps[BATCH_PAGES : BATCH_PAGES + len(new)] = keys[
                start : start + len(new), None
            ].view(np.uint8)
            # As engines do where the store evicts the ends of prefixes first.
            info = HiCacheStorageExtraInfo(prefix_keys=names[:start])
            answer = self._storage.batch_set_v2([self._transfer(1, new)], info)[PoolName.KV]
            result.written_bytes += sum(answer) * self._page_bytes

    def _transfer(self, half: int, names: list[str]) -> PoolTransfer:
        return PoolTransfer(PoolName.KV, self._slots[half][: len(names) * PAGE_SIZE], keys=names)


def plot(results: Sequence[ReplayResult]) -> str:
    """Draw hit rates by capacity as SVG; the capacities in a logarithmic scale."""
    limited = [one for one in results if one.capacity_bytes]
    logs = [math.log2(one.capacity_bytes or 1) for one in limited]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0
    ceiling = next((one for one in results if one.capacity_bytes is None), None)

    def x(capacity: int | None) -> float:
        return 60 + 500 * (math.log2(capacity or 1) - low) / span

    def y(rate: float) -> float:
        return 290 - 260 * rate

    shapes = [
        f'<line x1="60" x2="560" y1="{y(rate):.0f}" y2="{y(rate):.0f}" stroke="#ddd"/>'
        f'<text x="52" y="{y(rate) + 4:.0f}" text-anchor="end">{rate:.0%}</text>'
        for rate in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    if ceiling is not None:
        at = y(ceiling.hit_rate)
        shapes.append(
            f'<line x1="60" x2="560" y1="{at:.1f}" y2="{at:.1f}" stroke="#888" '
            f'stroke-dasharray="4"/><text x="64" y="{at - 5:.1f}">no limit</text>'
        )
    for number, label in enumerate(dict.fromkeys(one.label for one in limited)):
        mine = [one for one in limited if one.label == label]
        points = " ".join(f"{x(one.capacity_bytes):.1f},{y(one.hit_rate):.1f}" for one in mine)
        colour = COLOURS[number % len(COLOURS)]
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        shapes.append(
            f'<text x="{100 + 140 * number}" y="18" fill="{colour}">{escape(label)}</text>'
        )
    shapes += [
        f'<text x="{x(capacity):.0f}" y="310" text-anchor="middle">{size_text(capacity)}</text>'
        for capacity in sorted({one.capacity_bytes or 0 for one in limited})
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 325" font-family="sans-serif" '
        f'font-size="11" stroke-width="2"><g stroke-width="1">{"".join(shapes)}</g></svg>\n'
    )
