"""Multi-turn chat where prefill and decode run at different TP sizes: how much of each prompt comes
from the store, round by round, with pages in shards of KV heads and without.

Prefill at TP 2 stores the KV of prompts, decode at TP 4 that of the answers. A second run has one
engine, which is started again at another TP size after half of the rounds. Each rank is a storage
over the file driver with a host pool of its own heads; the KV of a page depends on all tokens before
it, and each restored page is compared with what it has to be.

    python examples/multiturn_tp.py

Without shards the prompt's last answer is computed twice, and a restart begins with nothing.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from hicache_storage import StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool
from hicache_storage.spec import PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCABULARY = 32_000
PAGE, LAYERS, HEADS, HEAD_DIM = 16, 2, 4, 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths of the turns of a conversation, in tokens."""

    clients: int = 8
    rounds: int = 8
    request: int = 256
    output: int = 256
    seed: int = 1

    @property
    def longest(self) -> int:
        return self.rounds * (self.request + self.output)


@dataclass
class Result:
    """Prompt tokens of each round, and how many of them came from the store."""

    prompt_tokens: list[int] = field(default_factory=list[int])
    restored_tokens: list[int] = field(default_factory=list[int])

    @property
    def rounds(self) -> list[float]:
        """The hit rate of each round."""
        pairs = zip(self.restored_tokens, self.prompt_tokens, strict=True)
        return [restored / prompt for restored, prompt in pairs]

    @property
    def overall(self) -> float:
        """The hit rate of all of them."""
        return sum(self.restored_tokens) / sum(self.prompt_tokens)


class Rank:
    """One TP rank: a storage, and a host pool of the heads that it holds."""

    def __init__(
        self, store: Path, longest: int, rank: int, tp_size: int, store_tp_size: int
    ) -> None:
        heads = HEADS // tp_size
        self.heads = slice(rank * heads, (rank + 1) * heads)
        identity = StorageIdentity(
            model="examples/multiturn_tp",
            kv_dtype="int16",
            page_size=PAGE,
            layout="page_head",
            tp_rank=rank,
            tp_size=tp_size,
            store_tp_size=store_tp_size,
        )
        self.pool = PagedHostPool(
            AttentionGeometry(
                layers=range(LAYERS), head_num=heads, head_dim=HEAD_DIM, dtype=torch.int16
            ),
            size=longest,
            page_size=PAGE,
            layout="page_head",
        )
        self.storage = create_storage("file", identity, {"path": str(store)})
        self.storage.register_mem_host_pool_v2(self.pool, "kv")

    def page(self, number: int) -> torch.Tensor:
        """K and V of a page of the pool: (2, heads, tokens, layers, elements)."""
        return torch.stack([part[number] for part in self.pool.parts])

    def fill(self, keys: Sequence[str]) -> None:
        """Compute the KV of pages."""
        for number, key in enumerate(keys):
            kv = model_kv(key)[:, self.heads]
            self.pool.parts[0][number], self.pool.parts[1][number] = kv[0], kv[1]

    def transfer(self, keys: Sequence[str]) -> list[PoolTransfer]:
        return [PoolTransfer(PoolName.KV, torch.arange(len(keys) * PAGE), keys=keys)]


class Engine:
    """The ranks of one TP size; nothing but the store outlives a request."""

    def __init__(self, store: Path, workload: Workload, tp_size: int, store_tp_size: int) -> None:
        self.ranks = [
            Rank(store, workload.longest, rank, tp_size, store_tp_size) for rank in range(tp_size)
        ]

    def restore(self, keys: Sequence[str]) -> int:
        """Restore the stored prefix of a prompt; the number of its pages.

        Raises:
            AssertionError: a page holds something else than its KV.
        """
        hit = min(rank.storage.batch_exists_v2(keys).kv_hit_pages for rank in self.ranks)
        if not hit:
            return 0
        for rank in self.ranks:
            rank.pool.parts[0].zero_()
            rank.pool.parts[1].zero_()
            assert all(rank.storage.batch_get_v2(rank.transfer(keys[:hit]))[PoolName.KV])
            for number, key in enumerate(keys[:hit]):
                assert torch.equal(rank.page(number), model_kv(key)[:, rank.heads])
        return hit

    def store(self, keys: Sequence[str]) -> None:
        """Compute pages and store them."""
        for rank in self.ranks:
            rank.fill(keys)
            rank.storage.batch_set_v2(rank.transfer(keys))

    def close(self) -> None:
        for rank in self.ranks:
            rank.storage.close()


def model_kv(key: str) -> torch.Tensor:
    """K and V of all heads of a page, which depend on its key alone: (2, heads, tokens, layers,
    elements)."""
    generator = torch.Generator().manual_seed(int(key[:12], 16))
    shape = (2, HEADS, PAGE, LAYERS, HEAD_DIM)
    return torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator)


def chain(tokens: Sequence[int]) -> list[str]:
    """Keys of the whole pages of a text, each over the tokens and the key before it."""
    keys, last = list[str](), b""
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + PAGE])
        last = hashlib.sha256(last + page).digest()
        keys.append(last.hex())
    return keys


def play(workload: Workload, engines: Callable[[int], tuple[Engine, Engine]]) -> Result:
    """Let the clients talk. `engines` gives those that prefill and decode in a round."""
    random, result = Random(workload.seed), Result()
    sessions: list[list[int]] = [[] for _ in range(workload.clients)]
    for number in range(workload.rounds):
        prefill, decode = engines(number)
        prompt_tokens = restored = 0
        for session in sessions:
            session += random.choices(range(VOCABULARY), k=workload.request)
            keys = chain(session)
            hit = prefill.restore(keys)
            prefill.store(keys)
            prompt_tokens += len(session)
            restored += hit * PAGE
            session += random.choices(range(VOCABULARY), k=workload.output)
            # The last token that was sampled has no KV yet.
            decode.store(chain(session[:-1]))
        result.prompt_tokens.append(prompt_tokens)
        result.restored_tokens.append(restored)
    return result


def disaggregated(workload: Workload, store_tp_size: int) -> Result:
    """Prefill at TP 2 beside decode at TP 4."""
    with tempfile.TemporaryDirectory(prefix="multiturn-tp-") as folder:
        prefill, decode = (
            Engine(Path(folder) / "store", workload, tp_size, store_tp_size) for tp_size in (2, 4)
        )
        result = play(workload, lambda number: (prefill, decode))
        for engine in (prefill, decode):
            engine.close()
    return result


def restarted(workload: Workload, store_tp_size: int) -> Result:
    """One engine at TP 4, and after half of the rounds at TP 2."""
    with tempfile.TemporaryDirectory(prefix="multiturn-tp-") as folder:
        before, after = (
            Engine(Path(folder) / "store", workload, tp_size, store_tp_size) for tp_size in (4, 2)
        )
        half = workload.rounds // 2
        result = play(
            workload, lambda number: (before, before) if number < half else (after, after)
        )
        for engine in (before, after):
            engine.close()
    return result


RUNS = {
    "prefill at TP 2, decode at TP 4": disaggregated,
    "TP 4, started again at TP 2": restarted,
}


def main() -> None:
    workload = Workload()
    for title, run in RUNS.items():
        shards, without = run(workload, HEADS), run(workload, 0)
        print(f"{title}\nround   store_tp_size={HEADS}     without")
        for number, rates in enumerate(zip(shards.rounds, without.rounds, strict=True)):
            print(f"{number:5}   {rates[0]:15.3f}   {rates[1]:9.3f}")
        print(f"  all   {shards.overall:15.3f}   {without.overall:9.3f}\n")


if __name__ == "__main__":
    main()
