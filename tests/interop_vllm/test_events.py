"""vLLM's KV events of the tier: what a subscriber knows is what the store has, after any number of evictions,
and after an engine was killed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash

from tests.interop.stores import FileStore, opened, tier
from tests.interop_vllm.engine_server import EngineServer, prompt, write
from tests.interop_vllm.tier_engine import Engine, keys
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SMALL = {"file": {"capacity": 1 << 20}, "hf3fs": {"file_size": 1 << 20}}
"""Options of a store with room for some 150 chunks, by driver."""


class Subscriber:
    """A router's picture of an engine's tier, by vLLM's events alone."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.known = set[object]()
        self.everything = set[object]()
        """Hashes that were ever named, also of other tiers."""
        self.batches = self.stored = self.removed = 0
        self._last = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while not self._closing.is_set():
            if not self._socket.poll(100):
                continue
            _, number, payload = self._socket.recv_multipart()
            number = int.from_bytes(number, "big")
            known = self.known.copy() if number == self._last + 1 else set()
            # Otherwise another engine has begun: what was known of the one before is void.
            self._last = number
            for event in decoder.decode(payload).events:
                self.everything.update(event.block_hashes)
                if event.medium != "STORAGE":
                    continue
                # Each once: subscribers may count them.
                if isinstance(event, BlockStored):
                    assert known.isdisjoint(event.block_hashes)
                    known.update(event.block_hashes)
                    self.stored += len(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    assert known.issuperset(event.block_hashes)
                    known.difference_update(event.block_hashes)
                    self.removed += len(event.block_hashes)
            self.known = known
            self.batches += 1


@contextmanager
def publishing(
    options: dict[str, object], subscriber: Subscriber
) -> Generator[subprocess.Popen[str]]:
    """An engine of its own, whose tier has these options; killed at the end."""
    module = "tests.interop_vllm.event_engine"
    argv = [sys.executable, "-m", module, subscriber.endpoint, json.dumps(options)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert told(process, "hello")
            # A publisher sends nothing to those that have not connected yet.
            before = subscriber.batches
            eventually(lambda: told(process, "hello") and subscriber.batches > before)
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], *command: object) -> bool:
    """Have a command done."""
    assert process.stdin
    assert process.stdout
    print(*command, file=process.stdin, flush=True)
    return process.stdout.readline() == "done\n"


def hashes(engine: Engine, count: int) -> set[object]:
    """Chunks that are stored, as the events name them."""
    wanted = keys(count)
    present = engine.tier.storage.batch_present(
        [get_offload_block_hash(key).hex() for key in wanted]
    )
    return {
        maybe_convert_block_hash(get_offload_block_hash(key))
        for key, is_there in zip(wanted, present, strict=True)
        if is_there
    }


@pytest.mark.parametrize(
    ("driver", "count"),
    [
        ("file", 1000),
        *(pytest.param(driver, 10_000, marks=pytest.mark.long) for driver in SMALL),
    ],
)
def test_a_subscriber_knows_what_the_store_has(tmp_path, driver, count):
    with opened(driver, tmp_path) as store, Subscriber() as subscriber:
        options = {"driver": driver, "driver_config": {**store.options, **SMALL[driver]}}
        directory = Engine(tmp_path, **options)
        with publishing(options, subscriber) as engine:
            assert told(engine, "store", 0, count // 4)
            eventually(lambda: subscriber.known == hashes(directory, count))
            # Killed somewhere in the middle of these.
            before = subscriber.stored
            print("store", count // 4, count, file=engine.stdin, flush=True)
            eventually(lambda: subscriber.stored > before + count // 8)
        with publishing(options, subscriber) as engine:
            assert subscriber.known == set()
            # Found there, not stored by this engine.
            assert told(engine, "load", 0, count)
            left = hashes(directory, count)
            eventually(lambda: subscriber.known == left)
            assert left
            assert told(engine, "store", 0, count)
            eventually(lambda: subscriber.known == hashes(directory, count))
        directory.close()
    # Most of them: the store has room for few, and some are evicted before they are published.
    assert subscriber.stored > subscriber.removed > count // 2


@pytest.mark.long
def test_a_subscriber_of_a_server_knows_what_the_store_has(tmp_path):
    """Of a real one, which is killed once and started again."""
    model, store = write(tmp_path / "model"), FileStore(tmp_path / "store")
    # Room for three prompts.
    store.options["capacity"] = "8MiB"
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    with Subscriber() as subscriber:
        arguments = ("--kv-events-config", json.dumps({**events, "endpoint": subscriber.endpoint}))

        def is_right() -> bool:
            asked = sorted(subscriber.everything)
            with store.reopened() as directory:
                present = directory.batch_present([each.hex() for each in asked])
            return subscriber.known == set(itertools.compress(asked, present))

        for numbers in (range(5, 12), [*range(5, 12), *range(12, 16)]):
            stored, removed = subscriber.stored, subscriber.removed
            entry = tier(store, enable_kv_events=True)
            with EngineServer(tmp_path, model, entry, arguments=arguments) as server:
                server.wait_until_up()
                for number in numbers:
                    server.ask(prompt(number))
                server.wait_for(is_right, "the subscriber is wrong")
            assert subscriber.known
            assert subscriber.stored - stored > subscriber.removed - removed > 0
