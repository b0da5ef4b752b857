"""This project's client of the metadata server against SGLang's, each with its own server, taking
turns.

    python benchmarks/metadata_clients.py

A round trip is what a driver waits for: a question about 128 keys that are there. SGLang's client
asks `get_page_indices`, ours `lookup`, whose answer also has generations, lengths and checksums.
Both are asked in a thread, as an engine does, and not in the main one, where our client does
without its short way.

Needs an environment with SGLang 0.5.23 (scripts/make_sglang_env.sh). Writes results.md and
results.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from file_vs_sglang import microseconds
from hf3fs_candidates import Hf3fsGlobalMetadataClient
from interleaved import Results, Samples, fresh_keys, machine, table, turns, wait_for_quiet
from metadata_vs_sglang import OUR_COMMAND, PEER_COMMAND, started

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_storage.objects import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PEER, OURS = "SGLang 0.5.23", "hicache"
SLOTS = 4096
GOAL = 0.5
"""Of the peer's time."""
SCOPE = "0:kv"


def peer_question(url: str, keys: list[str]) -> Callable[[], int]:
    """A scope with these keys; what asks for them, and says how many are there."""
    client = Hf3fsGlobalMetadataClient(url)
    client.initialize(0, SLOTS)
    leased = client.reserve_and_allocate_page_indices(0, [(key, "") for key in keys])
    client.confirm_write(0, [(key, slot) for key, (_, slot) in zip(keys, leased, strict=True)], [])
    return lambda: sum(slot is not None for slot in client.get_page_indices(0, keys))


def our_question(client: HttpMetadataClient, keys: list[str]) -> Callable[[], int]:
    """The same for ours."""
    client.refresh(Call(5.0))
    client.declare(
        p.ScopeGeometry(scope=SCOPE, slots=SLOTS, slot_bytes=1 << 16, identity="benchmark")
    )
    leased = client.reserve(
        [p.ReserveScope(scope=SCOPE, keys=keys)], Call(5.0), owner="benchmark", lease_seconds=10.0
    )
    leases = leased.scopes[0].leases
    lengths, checksums = [1 << 16] * len(keys), list(range(len(keys)))
    client.commit(
        [p.CommitScope(scope=SCOPE, leases=leases, lengths=lengths, checksums=checksums)], Call(5.0)
    )
    asked = [p.LookupScope(scope=SCOPE, keys=keys)]
    return lambda: sum(slot >= 0 for slot in client.lookup(asked, Call(1.0)).scopes[0].slots)


def in_a_thread(measure: Callable[[], None]) -> None:
    """Run it, and raise what it raises."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(measure).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/metadata-clients"))
    parser.add_argument("--keys", default="1,128", help="keys a question")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--calls", type=int, default=100, help="questions in a turn")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="seconds to wait for a quiet machine before each turn",
    )
    options = parser.parse_args()
    results, cpu = Results(), Results()

    def measure(count: str, candidates: Sequence[tuple[str, Callable[[], int]]]) -> None:
        for who, ask in turns(candidates, options.rounds):
            wait_for_quiet(options.patience)
            begin = time.process_time()
            for _ in range(options.calls):
                results.time(count, "lookup", who, ask, expect=int(count))
            spent = (time.process_time() - begin) / options.calls
            cpu.samples.setdefault((count, "lookup"), Samples()).add(who, spent)

    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        commands = {
            PEER: [sys.executable, *PEER_COMMAND, "PORT"],
            OURS: [
                sys.executable,
                *OUR_COMMAND,
                "PORT",
                "--store",
                f"sqlite:///{work}/metadata.db",
            ],
        }
        urls = {
            name: f"http://127.0.0.1:{stack.enter_context(started(name, command, Path(work, f'{name}.log'))).port}"
            for name, command in commands.items()
        }
        for count in map(int, options.keys.split(",")):
            client = HttpMetadataClient(urls[OURS])
            keys = fresh_keys(count)
            candidates = [
                (PEER, peer_question(urls[PEER], keys)),
                (OURS, our_question(client, keys)),
            ]
            in_a_thread(functools.partial(measure, str(count), candidates))
            client.close()
    rows = [
        [
            count,
            *(f"{microseconds(samples, who)} us" for who in (PEER, OURS)),
            f"{1 / samples.ratio(OURS, PEER):.2f}",
            f"{1 / samples.best_ratio(OURS, PEER):.2f}",
            f"{GOAL}" if count == "128" else "",
            *(f"{cpu.samples[count, operation].median(who) * 1e6:.0f} us" for who in (PEER, OURS)),
        ]
        for (count, operation), samples in results.samples.items()
    ]
    text = table(
        [
            "keys",
            PEER,
            OURS,
            "share of its time",
            "of the fastest",
            "goal",
            "CPU a call, SGLang",
            "ours",
        ],
        rows,
    )
    facts = {
        **machine(),
        **{name: importlib.metadata.version(name) for name in ("sglang", "hicache-storage")},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(text)
    raw = [
        {"keys": count, "seconds": samples.seconds}
        for (count, _), samples in results.samples.items()
    ]
    (options.out / "results.json").write_text(
        json.dumps({"machine": facts, "measured": raw}, indent=1)
    )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
