"""A serving loop: requests come and go while others are computed, and every prefix is looked for on
three tiers."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import torch

from hicache_storage import PoolName
from tiny_hybrid_lm_parts.model import Segment
from tiny_hybrid_lm_parts.requests import Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicache_storage.hybrid import HybridStack
    from hicache_storage.hybrid.radix import MatchResult
    from hicache_storage.pools import DevicePool
    from tiny_hybrid_lm_parts.requests import Request

    Pools = Mapping[PoolName, DevicePool]
    Forward = Callable[[Sequence[Segment], Pools, Callable[[int], None]], list[torch.Tensor]]

Found = TypeVar("Found")


class Server:
    """Continuous batching: in each step the chunks of prompts and the single tokens of answers are
    computed together.

    Args:
        forward: of a model; see `Model.forward`.
        stack: built from the model's config.
        running: requests that are computed together.
    """

    def __init__(self, forward: Forward, stack: HybridStack, *, running: int) -> None:
        self._forward = forward
        self.stack = stack
        self._limit = running
        self._cache = stack.cache
        self._kv = stack.device_pools[PoolName.KV]
        self._states = stack.device_pools.get(PoolName.MAMBA)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def serve(self, requests: Iterable[Request]) -> None:
        """Answer all of them."""
        for request in requests:
            self._fetch(request)
            self._waiting.append(request)
        while self._waiting or self._running:
            self._step()

    def _step(self) -> None:
        self._cache.poll()
        self._admit()
        if not self._running:
            time.sleep(0.0005)  # everything waits for the storage
            return
        arrivals = self._cache.start_loading()
        segments = [self._next_segment(request) for request in self._running]

        def wait(layer: int) -> None:
            arrivals.wait(layer, self.stack.compute)
            self._wait_on_cpu()

        logits = self._forward(segments, self.stack.device_pools, wait)
        for request, segment, found in zip(list(self._running), segments, logits, strict=True):
            self.advance(request, segment.end, found)

    def _admit(self) -> None:
        """Let requests run whose prefetch is over, in the order in which they came."""
        for request in list(self._waiting):
            if len(self._running) == self._limit:
                return
            if not self._cache.check_prefetch(request.name):
                continue
            # What was there when it began to wait may have been evicted for those that run.
            is_gone = self._cache.match(request.usable).length < request.known
            if not (is_gone and self._fetch(request)):
                self._waiting.remove(request)
                self._begin(request)
                self._running.append(request)

    def _fetch(self, request: Request) -> bool:
        """Begin to fetch what only the storage has of a prompt; False if there is nothing."""
        request.known = self._cache.match(request.usable).length
        return self._cache.prefetch_from_storage(request.name, request.usable)

    def _begin(self, request: Request) -> None:
        match = self._cache.match(request.usable)
        request.lock = self._cache.lock(match)
        request.rows = self._restore(request, match)
        if self._states:
            # After the state that was hit is copied, and may go.
            request.checkpoint = self._new_slot()
        request.tokens = list(request.prompt)
        request.computed = match.length
        request.cached = match.length
        fetched = min(match.host_length, max(0, match.length - request.known))
        request.restored = Restored(
            device=match.device_indices.numel(),
            host=match.host_length - fetched,
            storage=fetched,
            state_on_host=match.state_on_host,
        )

    def _restore(self, request: Request, match: MatchResult) -> torch.Tensor:
        """Rows of the prefix on the device, and its state in the request's slot, some of it on the
        way."""
        lock = _got(request.lock)
        loaded = _got(self._cache.load(lock))
        if loaded.state_slot is not None:
            request.slot = loaded.state_slot
        elif self._states:
            request.slot = self._new_slot()
        if match.state_slot is not None:
            self._copy_state(match.state_slot, request.slot)
            self._cache.release_state(lock)
        return loaded.device_indices

    def _next_segment(self, request: Request) -> Segment:
        """Return the tokens that are not computed yet, up to the next checkpoint."""
        start, grid = request.computed, self._cache.grid
        end = min(len(request.tokens), (start // grid + 1) * grid)
        page = self._cache.page_size
        need = -(-end // page) * page - request.rows.numel()
        if need > 0:
            request.rows = torch.cat([request.rows, _got(self._cache.alloc_kv(need))])
        return Segment(request.tokens[start:end], start, request.rows, request.slot)

    def advance(self, request: Request, end: int, logits: torch.Tensor) -> None:
        """Go on with a request whose tokens up to `end` are computed."""
        request.computed = end
        request.logits.append(logits)
        if self._states and end % self._cache.grid == 0:
            self._copy_state(request.slot, request.checkpoint)
            request.kept = end
        if end < len(request.tokens):
            return
        if end == len(request.prompt):
            self._insert(request, end, self._donated(request))
        request.tokens += self.sample(request, logits)
        if request.answered:
            self._finish(request)

    def sample(self, request: Request, logits: torch.Tensor) -> Sequence[int]:
        """Return the next tokens of an answer."""
        return [int(logits[-1].argmax())]

    def _donated(self, request: Request) -> dict[int, int]:
        """A copy of the last checkpoint for the cache, if there is one and a slot for it."""
        slot = self._cache.alloc_state() if request.kept else None
        if slot is None:
            return {}
        self._copy_state(request.checkpoint, int(slot))
        return {request.kept: int(slot)}

    def _finish(self, request: Request) -> None:
        """Hand the turn over to the cache. The last token was sampled and not computed."""
        length = self._cache.committed_length(len(request.tokens))
        gives_state = 0 < request.kept == length
        self._insert(request, length, {length: request.checkpoint} if gives_state else {})
        self._kv.free(request.rows[request.cached :])
        if self._states:
            self._states.free(
                torch.tensor([request.slot] if gives_state else [request.slot, request.checkpoint])
            )
        self._cache.unlock(_got(request.lock))
        self._running.remove(request)

    def _insert(self, request: Request, length: int, states: dict[int, int]) -> None:
        result = self._cache.insert(request.tokens[:length], request.rows, states)
        lock = self._cache.lock(result)
        self._cache.unlock(_got(request.lock))
        request.rows = torch.cat([result.device_indices, request.rows[result.length :]])
        request.cached = max(request.cached, result.length)
        request.lock = lock

    def _new_slot(self) -> int:
        return int(_got(self._cache.alloc_state()))

    def _copy_state(self, source: int, target: int) -> None:
        self._wait_on_cpu()
        if self._states:
            for buffer in self._states.parts:
                buffer[:, target] = buffer[:, source]

    def _wait_on_cpu(self) -> None:
        """On the CPU the model computes in this thread, which waits for what its stream would wait
        for."""
        if self._kv.device.type == "cpu":
            self.stack.compute.synchronize()


def _got(found: Found | None) -> Found:
    if found is None:
        raise MemoryError(
            "the device is too small for the requests that run at once; give it more slots, or run "
            "fewer"
        )
    return found
