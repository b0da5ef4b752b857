"""A serving engine in miniature over the whole cache stack, with a toy model whose cache can be
compared exactly.

Used by the examples; see `multiturn.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from hicache_storage.hybrid import (
    AttentionGeometry,
    MambaGeometry,
    PrefetchPolicy,
    PrefetchRules,
    StackConfig,
    build_hybrid_stack,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage import HiCacheStorage
    from hicache_storage.hybrid.radix import MatchResult, PrefixLock
    from hicache_storage.pools import DevicePool

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Dimensions of the model and the machine. Lengths in tokens."""

    page: int
    state_chunk: int
    """After so many tokens the state kernel has a state to give."""
    interval: int
    """Between the checkpoints that the engine keeps states at."""
    device_tokens: int
    """KV slots of the device, whole pages."""
    device_states: int
    """State slots of the device: two for each request that runs, and those that are kept."""
    host_tokens: int
    host_states: int


class Model:
    """One attention layer and one recurrent layer, in integers: what they hold of a prefix is
    exact.

    The KV of a token is itself and its place. The state is a running sum weighted by place, and the
    last four tokens.
    """

    def __init__(self, kv: DevicePool, states: DevicePool) -> None:
        self.kv = kv
        self.states = states

    def write_kv(self, rows: torch.Tensor, tokens: Sequence[int], start: int) -> None:
        """Compute the KV of tokens from place `start` on."""
        place = self.kv.device
        for buffer, values in zip(
            (self.kv.parts[0][0], self.kv.parts[1][0]), _kv(tokens, start), strict=True
        ):
            buffer[rows.to(place), 0] = values.to(place)

    def write_state(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Go on in a slot from the state after `start` tokens to the one after all of `tokens`."""
        new = torch.tensor(tokens[start:], dtype=torch.int64)
        before = 0 if start == 0 else int(self.states.parts[0][0, slot, 0])
        self.states.parts[0][0, slot, 0] = before + int(
            (new * torch.arange(start + 1, len(tokens) + 1)).sum()
        )
        self.states.parts[1][0, slot] = _window(tokens)

    def copy_state(self, source: int, target: int) -> None:
        """From slot to slot."""
        for buffer in self.states.parts:
            buffer[:, target] = buffer[:, source]

    def check(self, rows: torch.Tensor, slot: int, tokens: Sequence[int]) -> None:
        """Compare what the cache gave with a full recomputation."""
        keys, values = _kv(tokens, 0)
        places = torch.arange(1, len(tokens) + 1)
        intact = (
            torch.equal(self.kv.parts[0][0][rows, 0].cpu(), keys)
            and torch.equal(self.kv.parts[1][0][rows, 0].cpu(), values)
            and int(self.states.parts[0][0, slot, 0]) == int((torch.tensor(tokens) * places).sum())
            and torch.equal(self.states.parts[1][0, slot].cpu(), _window(tokens))
        )
        if not intact:
            raise AssertionError(
                f"the cache of a prefix of {len(tokens)} tokens is not that of its tokens"
            )


def stack_config(sizes: Sizes) -> StackConfig:
    """The cache of the model on a machine of these sizes."""
    return StackConfig(
        attention=AttentionGeometry(layers=(0,), head_num=1, head_dim=2, dtype=torch.int32),
        mamba=MambaGeometry(
            layers=(1,),
            temporal_shape=(1,),
            conv_shapes=((4,),),
            temporal_dtype=torch.int64,
            conv_dtype=torch.int32,
            state_chunk=sizes.state_chunk,
        ),
        page_size=sizes.page,
        checkpoint_interval=sizes.interval,
        device_tokens=sizes.device_tokens,
        device_states=sizes.device_states,
        host_tokens=sizes.host_tokens,
        host_states=sizes.host_states,
        device="cuda" if torch.cuda.is_available() else "cpu",
        prefetch=PrefetchRules(
            policy=PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=sizes.page, occupancy=1.0
        ),
    )


@dataclass(eq=False)
class Request:
    """A request that runs."""

    tokens: list[int]
    rows: torch.Tensor
    """KV slots, whole pages."""
    cached: int
    """How many of its tokens are the cache's."""
    slot: int
    checkpoint: int
    """The slot of the state that was kept last."""
    lock: PrefixLock
    reused: int
    """How many of its tokens came from the cache."""
    kept: int = 0
    """After how many tokens that state was kept; 0 for none yet."""


class Server:
    """A serving engine in miniature: prefill, decode, and the cache around them. To be closed."""

    def __init__(self, sizes: Sizes, storage: HiCacheStorage | None = None) -> None:
        """Start serving. The server opens and closes the storage; None for none."""
        self.stack = build_hybrid_stack(stack_config(sizes), storage=storage)
        self.cache = self.stack.cache
        states = cast("DevicePool", self.stack.states)
        self.model = Model(self.stack.kv, states)
        self.grid = self.cache.grid
        self._page = sizes.page

    def close(self) -> None:
        """End all copies and the storage."""
        self.stack.close()

    def serve(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> list[int]:
        """Run requests at once; returns for each how many prompt tokens came from the cache.

        What was cached is in storage when this returns, so that the rates do not depend on the
        speed of a disk.
        """
        requests = [self._prefill(prompt) for prompt in prompts]
        for request, output in zip(requests, outputs, strict=True):
            self._decode(request, output)
        self.settle()
        return [request.reused for request in requests]

    def settle(self) -> None:
        """Wait until nothing is under way."""
        while not self.cache.idle():
            self.cache.poll()
            time.sleep(0.0005)

    def _prefill(self, prompt: list[int]) -> Request:
        # The last token of a prompt is computed in any case: its logits are what the model is asked
        # for.
        self._fetch(prompt[:-1])
        match = self.cache.match(prompt[:-1])
        lock = self.cache.lock(match)
        rows, slot = self._restore(match, lock)
        if match.length:
            self.model.check(rows, slot, prompt[: match.length])
        request = Request(
            [], rows, match.length, slot, int(_got(self.cache.alloc_state())), lock, match.length
        )
        self._compute_tokens(request, prompt)
        self._insert(request, len(prompt), self._donated(request))
        return request

    def _decode(self, request: Request, output: list[int]) -> None:
        # The last token was sampled and never computed.
        computed = [*request.tokens, *output[:-1]]
        self._compute_tokens(request, computed)
        length = self.cache.committed_length(len(computed) + 1)
        keeps = 0 < request.kept == length
        self._insert(request, length, {length: request.checkpoint} if keeps else {})
        self.model.kv.free(request.rows[request.cached :])
        self.model.states.free(
            torch.tensor([request.slot] if keeps else [request.slot, request.checkpoint])
        )
        self.cache.unlock(request.lock)

    def _donated(self, request: Request) -> dict[int, int]:
        """A copy of the state that was kept last, for the cache, if there is a slot for it."""
        slot = self.cache.alloc_state() if request.kept else None
        if slot is None:
            return {}
        self._wait_for_copies()
        self.model.copy_state(request.checkpoint, int(slot))
        return {request.kept: int(slot)}

    def _fetch(self, tokens: list[int]) -> None:
        if self.cache.prefetch_from_storage("next", tokens):
            while not self.cache.check_prefetch("next"):
                self.cache.poll()
                time.sleep(0.0005)

    def _restore(self, match: MatchResult, lock: PrefixLock) -> tuple[torch.Tensor, int]:
        """Rows of a prefix on the device, and a slot with its state."""
        slot = int(_got(self.cache.alloc_state()))
        if not match.needs_load:
            if match.state_slot is not None:
                self._wait_for_copies()
                self.model.copy_state(match.state_slot, slot)
                self.cache.release_state(lock)
            return match.device_indices, slot
        loaded = _got(self.cache.load(lock, slot))
        self.cache.start_loading().synchronize()
        return loaded.device_indices, slot

    def _compute_tokens(self, request: Request, tokens: list[int]) -> None:
        """Compute what is not there yet, and keep the state of the last checkpoint on the way."""
        need = -(-len(tokens) // self._page) * self._page - request.rows.numel()
        if need > 0:
            request.rows = torch.cat([request.rows, _got(self.cache.alloc_kv(need))])
        start = len(request.tokens) or request.reused
        self._wait_for_copies()
        self.model.write_kv(request.rows[start : len(tokens)], tokens[start:], start)
        end = len(tokens) // self.grid * self.grid
        if end > start:
            self.model.write_state(request.slot, tokens[:end], start)
            self.model.copy_state(request.slot, request.checkpoint)
            request.kept = end
        self.model.write_state(request.slot, tokens, max(start, end))
        request.tokens = tokens

    def _insert(self, request: Request, length: int, states: dict[int, int]) -> None:
        result = self.cache.insert(request.tokens[:length], request.rows, states)
        lock = self.cache.lock(result)
        self.cache.unlock(request.lock)
        request.rows = torch.cat([result.device_indices, request.rows[result.length :]])
        request.cached = max(request.cached, result.length)
        request.lock = lock

    def _wait_for_copies(self) -> None:
        """The toy computes on the caller's thread, which therefore waits for what its stream would
        wait for."""
        self.stack.compute.synchronize()


def _kv(tokens: Sequence[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (tokens, 2) of tokens from place `start` on."""
    words = torch.tensor(tokens, dtype=torch.int32)
    places = torch.arange(start, start + len(tokens), dtype=torch.int32)
    return torch.stack([words, places], dim=1), torch.stack([places, -words], dim=1)


def _window(tokens: Sequence[int]) -> torch.Tensor:
    """The last four tokens, zeros before the first."""
    return torch.tensor([0, 0, 0, 0, *tokens][-4:], dtype=torch.int32)


def _got(found: Found | None) -> Found:
    if found is None:
        raise MemoryError(
            "the device is too small for the requests that run at once; give it more slots or "
            "sessions"
        )
    return found
