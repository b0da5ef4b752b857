"""vLLM's KV events of the tier: what a subscriber knows is what the store has, after any number of evictions,
and after an engine was killed."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Self

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.interop.stores import FileStore, tier
from tests.interop_vllm.engine_server import EngineServer, prompt, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


class Subscriber:
    """A router's picture of an engine's tier, by vLLM's events alone."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.known = set[object]()
        self.everything = set[object]()
        """Hashes that were ever named, also of other tiers."""
        self.stored = 0
        self.removed = 0
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


def test_a_subscriber_of_a_server_knows_what_the_store_has(tmp_path):
    """The server is killed once and started again."""
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
