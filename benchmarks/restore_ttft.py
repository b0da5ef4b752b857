"""Time to the first token of a real SGLang server on the CPU: a long prompt recomputed, restored
from the file driver, and restored from SGLang's own file backend, in turns.

    python benchmarks/restore_ttft.py [--tokens 4096] [--rounds 7] [--out DIR]

Both servers stay up. In each round each is asked a prompt that nobody has seen (recomputed), then
the same prompt after its device and host memory were flushed (restored); both answers have the same
tokens. The driver's part of a restore is what its own histograms counted meanwhile; verification
and the copy by the kernel are part of the read, and are told apart by hashing, and by copying, as
many bytes here.

Needs an environment with SGLang 0.5.23 (scripts/make_sglang_env.sh). Writes results.md and
results.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from interleaved import machine, table, turns

from tests.interop.engine_server import ON_CPU, PAGE_SIZE, Answer, EngineServer, prepare_engine
from tests.interop.tiny_model import LLAMA, VOCABULARY

OURS, PEER = "file driver", "SGLang's file backend"
LAYERS, KV_HEADS, HEAD_WIDTH = 8, 2, 64
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_WIDTH * torch.float32.itemsize
MODEL = {
    **LLAMA,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "max_position_embeddings": 1 << 16,
}
SUM = re.compile(r'hicache_storage_call_seconds_sum\{.*operation="(\w+)".*\} (\S+)')


@dataclass
class Side:
    """A server, and what it was measured at, in seconds."""

    name: str
    server: EngineServer
    store: Path
    recomputed: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    lookups: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    def stored_pages(self) -> int:
        if self.name == OURS:
            return min(self.server.counted("written"))
        return len(list(self.store.iterdir()))

    def calls(self) -> dict[str, float]:
        """Seconds of the driver's calls so far, by operation."""
        if self.name != OURS:
            return {}
        return {name: float(value) for name, value in SUM.findall(self.server.metrics())}

    def measure(self, prompt: list[int]) -> None:
        """Ask for the first token of a new prompt twice.

        Raises:
            AssertionError: not all pages were restored, or the answer is another one.
        """
        pages = len(prompt) // PAGE_SIZE
        before = self.stored_pages()
        first = self._timed(prompt, self.recomputed)
        self.server.wait_for(
            lambda: self.stored_pages() >= before + pages, f"{pages} pages are not written"
        )
        self.server.flush()
        calls = self.calls()
        again = self._timed(prompt, self.restored)
        for operation, samples in (("exists", self.lookups), ("get", self.reads)):
            samples.append(self.calls().get(operation, 0.0) - calls.get(operation, 0.0))
        if first.cached or again.from_storage != pages * PAGE_SIZE or not again.says(first):
            raise AssertionError(f"{self.name}: {first} and then {again}")
        self.server.flush()

    def _timed(self, prompt: list[int], samples: list[float]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        started = time.perf_counter()
        answer = self.server.ask(prompt, sampling_params=sampling)
        samples.append(time.perf_counter() - started)
        return answer


def start(stack: ExitStack, root: Path, name: str, tokens: int) -> Side:
    """Start a server with one of the stores."""
    place = root / ("ours" if name == OURS else "peer")
    place.mkdir()
    store = place / "store"
    store.mkdir()
    command = prepare_engine(place, ranks=1, config=MODEL)
    options = f"--max-total-tokens {4 * tokens}"
    if name == PEER:
        options += " --hicache-storage-backend file --hicache-storage-backend-extra-config {}"
    server = EngineServer(place, command, ranks=1, options=options)
    server.environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(store)
    stack.enter_context(server)
    return Side(name, server.wait_until_up(), store)


def seconds_of_bytes(size: int) -> tuple[float, float]:
    """Seconds to checksum so many bytes, and to copy them, page by page."""
    page = PAGE_SIZE * TOKEN_BYTES
    source = torch.randint(0, 256, (size // page, page), dtype=torch.uint8)
    target = torch.empty_like(source)
    hashed, copied = list[float](), list[float]()
    for _ in range(7):
        started = time.perf_counter()
        for row in source:
            xxhash.xxh3_64_digest(row.numpy())
        hashed.append(time.perf_counter() - started)
        started = time.perf_counter()
        for row, place in zip(source, target, strict=True):
            place.copy_(row)
        copied.append(time.perf_counter() - started)
    return statistics.median(hashed), statistics.median(copied)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out/restore-ttft"))
    options = parser.parse_args()
    # A page and more stay to be computed: SGLang computes the last token of a prompt anyway.
    tokens = options.tokens // PAGE_SIZE * PAGE_SIZE
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttft-")))
        sides = [start(stack, root, name, tokens) for name in (OURS, PEER)]
        draw = random.Random(0)
        for side in turns(sides, options.rounds + 1):
            side.measure([draw.randrange(3, VOCABULARY) for _ in range(tokens + 5)])
    hashed, copied = seconds_of_bytes(tokens * TOKEN_BYTES)
    rows = [
        [
            side.name,
            # The first round also pays for what a server does once.
            *(_milliseconds(some[1:]) for some in (side.recomputed, side.restored)),
            f"{statistics.median(side.recomputed[1:]) / statistics.median(side.restored[1:]):.1f}x",
            *(
                _milliseconds(some[1:]) if side.name == OURS else "not measured"
                for some in (side.lookups, side.reads)
            ),
        ]
        for side in sides
    ]
    header = ["store", "recomputed", "restored", "ratio", "lookups", "reads"]
    results = table(header, rows) + (
        f"\n{tokens} tokens, {tokens * TOKEN_BYTES / (1 << 20):.0f} MiB in pages of "
        f"{PAGE_SIZE * TOKEN_BYTES >> 10} KiB. To checksum as many bytes takes "
        f"{1e3 * hashed:.1f} ms here, to copy them {1e3 * copied:.1f} ms.\n"
    )
    print(results)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(results)
    (options.out / "results.json").write_text(
        json.dumps(
            {
                "machine": machine(),
                "options": ON_CPU,
                "tokens": tokens,
                "token_bytes": TOKEN_BYTES,
                "checksum_seconds": hashed,
                "copy_seconds": copied,
                "seconds": {
                    side.name: {
                        "recomputed": side.recomputed,
                        "restored": side.restored,
                        "lookups": side.lookups,
                        "reads": side.reads,
                    }
                    for side in sides
                },
            },
            indent=2,
        )
    )


def _milliseconds(seconds: list[float]) -> str:
    low, middle, high = (
        1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds))
    )
    return f"{middle:.1f} ms ({low:.1f} - {high:.1f})"


if __name__ == "__main__":
    main()
