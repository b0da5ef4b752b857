"""Multi-turn chat on a hybrid model: how much of each prompt the cache saves, round by round, with
and without storage.

Ten clients talk for twelve rounds. Each prompt is all that was said before and a new question, and
the model can only go on where a recurrent state was kept: at checkpoints. Requests run through the
whole stack: `HiMambaRadixCache` over `HybridCacheController`, device copies on streams (CUDA, or
the simulator where there is none), host pools, and the file driver. The model is a toy whose KV and
states depend on every token before them; each hit is compared with a full recomputation.

    python examples/multiturn.py [--json FILE]

With storage behind it, a device with few slots for states serves every round as if it had kept
everything. Without, the states of sessions that wait are gone when they come back.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from toy_hybrid_server import Server, Sizes

from hicache_storage import StorageIdentity, create_storage

VOCABULARY = 150_000


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

    def sizes(self, state_slots: int, *, sessions: int, offload: bool) -> Sizes:
        """A machine for it.

        Args:
            state_slots: on the device.
            sessions: whose KV the device holds.
            offload: whether the host has memory to offload to: for two sessions. Otherwise it has a
                single page.
        """
        return Sizes(
            page=self.page,
            state_chunk=self.state_chunk,
            interval=self.interval,
            device_tokens=sessions * self.longest,
            device_states=state_slots,
            host_tokens=2 * self.longest if offload else self.page,
            host_states=8 if offload else 1,
        )


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
    storage = create_storage("file", identity, {"path": str(store)}) if store else None
    sizes = workload.sizes(
        state_slots, sessions=sessions or workload.clients + 1, offload=store is not None
    )
    server = Server(sizes, storage)
    try:
        return _play(workload, server)
    finally:
        server.close()


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
            cached += sum(server.serve(prompts, outputs))
            prompt_tokens += sum(map(len, prompts))
            for client, output in zip(batch, outputs, strict=True):
                sessions[client] += output
        result.cached_tokens.append(cached)
        result.prompt_tokens.append(prompt_tokens)
    return result


def _text(random: Random, length: int) -> list[int]:
    return random.choices(range(VOCABULARY), k=length)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the rates are written")
    parser.add_argument("--state-slots", type=int, default=8, help="states that the device holds")
    parser.add_argument(
        "--sweep",
        type=int,
        nargs="*",
        default=[4, 8, 16, 24, 32, 48, 64],
        help="other numbers of them to try",
    )
    for name in Workload.__dataclass_fields__:
        default = getattr(Workload, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"default {default}")
    options = parser.parse_args()
    workload = Workload(**{name: getattr(options, name) for name in Workload.__dataclass_fields__})
    slots = sorted({options.state_slots, *options.sweep})

    with_storage = {count: _stored(workload, count) for count in slots}
    alone = {count: play(workload, count, None) for count in slots}
    _report(with_storage[options.state_slots], alone[options.state_slots], options.state_slots)
    if options.json:
        options.json.write_text(
            json.dumps(_as_json(workload, options.state_slots, with_storage, alone), indent=2)
            + "\n"
        )


def _stored(workload: Workload, state_slots: int) -> Result:
    """A run with an empty store, which goes when it is over."""
    with tempfile.TemporaryDirectory(prefix="multiturn-") as folder:
        return play(workload, state_slots, Path(folder) / "store")


def _report(stored: Result, alone: Result, slots: int) -> None:
    print(f"hit rate with {slots} state slots on the device")
    print("round   with storage   device only")
    for number, rates in enumerate(zip(stored.rounds, alone.rounds, strict=True)):
        print(f"{number:5}   {rates[0]:12.6f}   {rates[1]:11.6f}")
    print(f"  all   {stored.overall:12.6f}   {alone.overall:11.6f}")


def _as_json(
    workload: Workload, slots: int, stored: dict[int, Result], alone: dict[int, Result]
) -> dict[str, object]:
    return {
        "workload": asdict(workload),
        "state_slots": slots,
        "rounds": stored[slots].rounds,
        "overall": stored[slots].overall,
        "prompt_tokens": stored[slots].prompt_tokens,
        "cached_tokens": stored[slots].cached_tokens,
        "device_only": {"rounds": alone[slots].rounds, "overall": alone[slots].overall},
        "sweep": [
            {
                "state_slots": count,
                "with_storage": stored[count].overall,
                "device_only": alone[count].overall,
            }
            for count in sorted(stored)
        ],
    }


if __name__ == "__main__":
    main()
