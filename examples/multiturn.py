"""Multi-turn chat on a hybrid model: how much of each prompt the cache saves, round by round, with
and without storage.

Ten clients talk for twelve rounds. Each prompt is all that was said before and a new question, and
the model can only go on where a recurrent state was kept: at checkpoints. Requests run through the
whole stack: `HiMambaRadixCache` over `HybridCacheController`, device copies on streams (CUDA, or
the simulator where there is none), host pools, and the file driver. The model is a toy whose KV and
states depend on every token before them; each hit is compared with a full recomputation.

    python examples/multiturn.py

With storage behind it, a device with few slots for states serves every round as if it had kept
everything. Without, the states of sessions that wait are gone when they come back.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from tiny_hybrid_lm_parts.chat import settle
from tiny_hybrid_lm_parts.requests import Request
from tiny_hybrid_lm_parts.server import Server

from hicache_storage import PoolName, StorageIdentity, create_storage
from hicache_storage.hybrid import (
    AttentionGeometry,
    MambaGeometry,
    PrefetchPolicy,
    PrefetchRules,
    StackConfig,
    build_hybrid_stack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiny_hybrid_lm_parts.model import Segment

    from hicache_storage.hybrid import HybridStack
    from hicache_storage.pools import DevicePool

VOCABULARY = 150_000
STATE_SLOTS = 8
"""States that the device holds."""
WINDOW = 4
"""Last tokens that a state holds."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths of the turns of a conversation, in tokens."""

    clients: int = 10
    rounds: int = 12
    request: int = 1024
    output: int = 1024
    page: int = 64
    state_chunk: int = 64
    """After so many tokens the state kernel has a state to give."""
    interval: int = 256
    """Between the checkpoints that the engine keeps states at."""
    running: int = 2
    """Requests that run at once."""
    seed: int = 1

    @property
    def longest(self) -> int:
        """A session at its end, in whole pages."""
        return -(-self.rounds * (self.request + self.output) // self.page) * self.page

    def config(self, state_slots: int, *, sessions: int, offload: bool) -> StackConfig:
        """The cache of the toy model, on a machine for this workload.

        Args:
            state_slots: on the device: two for each request that runs, and those that are kept.
            sessions: whose KV the device holds.
            offload: whether the host has memory to offload to: for two sessions. Otherwise it has a
                single page.
        """
        return StackConfig(
            attention=AttentionGeometry(layers=(0,), head_num=1, head_dim=2, dtype=torch.int32),
            mamba=MambaGeometry(
                layers=(1,),
                temporal_shape=(1,),
                conv_shapes=((WINDOW,),),
                temporal_dtype=torch.int64,
                conv_dtype=torch.int32,
                state_chunk=self.state_chunk,
            ),
            page_size=self.page,
            checkpoint_interval=self.interval,
            device_tokens=sessions * self.longest,
            device_states=state_slots,
            host_tokens=2 * self.longest if offload else self.page,
            host_states=8 if offload else 1,
            device="cuda" if torch.cuda.is_available() else "cpu",
            prefetch=PrefetchRules(
                policy=PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=self.page, occupancy=1.0
            ),
        )


@dataclass(eq=False)
class Turn(Request):
    """A request whose answer is known."""

    answer: Sequence[int] = ()


class ToyServer(Server):
    """Serves one attention layer and one recurrent layer, in integers: what they hold of a prefix is
    exact.

    The KV of a token is itself and its place. The state is a running sum weighted by place, and the
    last tokens.
    """

    def __init__(self, stack: HybridStack, *, running: int) -> None:
        super().__init__(_compute, stack, running=running)

    def advance(self, request: Request, end: int, logits: torch.Tensor) -> None:
        # What is computed first goes on from what was restored: it is right if that was.
        if request.computed == request.restored.tokens:
            self.check(request.rows[:end], request.slot, request.tokens[:end])
        super().advance(request, end, logits)

    def sample(self, request: Request, logits: torch.Tensor) -> Sequence[int]:
        """All tokens that are computed together, and then the last, which is not computed."""
        assert isinstance(request, Turn)
        done = len(request.tokens) - len(request.prompt)
        return request.answer[done:] if done else request.answer[: max(1, len(request.answer) - 1)]

    def check(self, rows: torch.Tensor, slot: int, tokens: Sequence[int]) -> None:
        """Compare what the device holds with a full recomputation."""
        pools, places = self.stack.device_pools, torch.arange(1, len(tokens) + 1)
        kv, states = pools[PoolName.KV], pools[PoolName.MAMBA]
        found = [*(part[0][rows, 0] for part in kv.parts), states.parts[0][0, slot]]
        wanted = [*_kv(tokens, 0), (torch.tensor(tokens) * places).sum().view(1)]
        window = torch.tensor([*[0] * WINDOW, *tokens][-WINDOW:], dtype=torch.int32)
        pairs = zip([*found, states.parts[1][0, slot]], [*wanted, window], strict=True)
        if not all(torch.equal(one.cpu(), other) for one, other in pairs):
            raise AssertionError(
                f"the cache of a prefix of {len(tokens)} tokens is not that of its tokens"
            )


def _compute(
    segments: Sequence[Segment],
    pools: Mapping[PoolName, DevicePool],
    wait: Callable[[int], None],
) -> list[torch.Tensor]:
    """Compute the KV and the states of tokens; there are no logits."""
    (keys, values), (sums, windows) = (pools[name].parts for name in (PoolName.KV, PoolName.MAMBA))
    place = keys.device
    for layer in range(2):
        wait(layer)
    for segment in segments:
        new, slot = segment.rows[segment.start : segment.end].to(place), segment.slot
        keys[0, new, 0], values[0, new, 0] = (
            part.to(place) for part in _kv(segment.tokens, segment.start)
        )
        if not segment.start:
            sums[0, slot], windows[0, slot] = 0, 0
        tokens = torch.tensor(segment.tokens)
        sums[0, slot] += int((tokens * torch.arange(segment.start + 1, segment.end + 1)).sum())
        windows[0, slot] = torch.cat([windows[0, slot], tokens.int().to(place)])[-WINDOW:]
    return [torch.empty(0)] * len(segments)


def _kv(tokens: Sequence[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (tokens, 2) of tokens from place `start` on."""
    words = torch.tensor(tokens, dtype=torch.int32)
    places = torch.arange(start, start + len(tokens), dtype=torch.int32)
    return torch.stack([words, places], dim=1), torch.stack([places, -words], dim=1)


@dataclass
class Result:
    """Prompt tokens of each round, and how many of them came from the cache."""

    prompt_tokens: list[int] = field(default_factory=list[int])
    cached_tokens: list[int] = field(default_factory=list[int])

    @property
    def rounds(self) -> list[float]:
        """The hit rate of each round."""
        return [
            cached / prompt
            for cached, prompt in zip(self.cached_tokens, self.prompt_tokens, strict=True)
        ]

    @property
    def overall(self) -> float:
        """The hit rate of all of them."""
        return sum(self.cached_tokens) / sum(self.prompt_tokens)


def play(
    workload: Workload,
    state_slots: int,
    store: Path | None,
    *,
    sessions: int | None = None,
) -> Result:
    """Let the clients talk; all finish a round before the next begins.

    Args:
        state_slots: on the device.
        store: directory of the file driver; None for a machine without host memory and storage to
            offload to.
        sessions: whose KV the device holds; None for all, so that states alone are scarce.
    """
    identity = StorageIdentity(
        model="examples/multiturn", kv_dtype="int32", page_size=workload.page, layout="page_first"
    )
    config = workload.config(
        state_slots, sessions=sessions or workload.clients + 1, offload=store is not None
    )
    with build_hybrid_stack(config) as stack:
        if store:
            stack.attach(create_storage("file", identity, {"path": str(store)}))
        return _play(workload, ToyServer(stack, running=workload.running))


def _play(workload: Workload, server: Server) -> Result:
    random, result = Random(workload.seed), Result()
    sessions: list[list[int]] = [[] for _ in range(workload.clients)]
    for _ in range(workload.rounds):
        order = random.sample(range(workload.clients), workload.clients)
        cached = prompt_tokens = 0
        for first in range(0, workload.clients, workload.running):
            batch = order[first : first + workload.running]
            for client in batch:
                sessions[client] += _text(random, workload.request)
            outputs = [_text(random, workload.output) for _ in batch]
            prompts = [list(sessions[client]) for client in batch]
            cached += serve(server, prompts, outputs)
            prompt_tokens += sum(map(len, prompts))
            for client, output in zip(batch, outputs, strict=True):
                sessions[client] += output
        result.cached_tokens.append(cached)
        result.prompt_tokens.append(prompt_tokens)
    return result


def serve(server: Server, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> int:
    """Run requests at once; returns how many prompt tokens came from the cache.

    What was cached is in storage when this returns, so that the rates do not depend on the speed of
    a disk.
    """
    turns = [
        Turn(str(number), prompt, len(output), answer=output)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    server.serve(turns)
    settle(server)
    return sum(turn.restored.tokens for turn in turns)


def _text(random: Random, length: int) -> list[int]:
    return random.choices(range(VOCABULARY), k=length)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="multiturn-") as folder:
        stored = play(Workload(), STATE_SLOTS, Path(folder) / "store")
    alone = play(Workload(), STATE_SLOTS, None)
    print(f"hit rate with {STATE_SLOTS} state slots on the device")
    print("round   with storage   device only")
    for number, rates in enumerate(zip(stored.rounds, alone.rounds, strict=True)):
        print(f"{number:5}   {rates[0]:12.6f}   {rates[1]:11.6f}")
    print(f"  all   {stored.overall:12.6f}   {alone.overall:11.6f}")


if __name__ == "__main__":
    main()
