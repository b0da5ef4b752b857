"""A tier under vLLM's own publisher of KV events, in a process that may be killed.

Each line of standard input is a command: `store FIRST COUNT` or `load FIRST COUNT` of numbered chunks. It
steps as vLLM's engine does, while there is a job or the tier has work, and prints `done` when it is idle.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

from tests.interop_vllm.tier_engine import CHUNKS, Engine, keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_offload.base import OffloadKey

JOB = CHUNKS // 2
"""Chunks of a job; two of them are under way at a time."""


class PublishingEngine(Engine):
    """An engine whose tier's events are published.

    Args:
        endpoint: address of ZeroMQ that the publisher connects to.
        options: of the tier.
    """

    def __init__(self, endpoint: str, options: dict[str, object]) -> None:
        super().__init__("", enable_kv_events=True, **options)
        self._publisher = ZmqEventPublisher(0, endpoint)
        self._tracker = OffloadingEventsTracker(
            OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
        )

    def publish(self) -> None:
        """Publish what has happened; nothing, too."""
        events = list(self._tracker.take_events(self.tier.take_events()))
        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def run(self, wanted: Sequence[OffloadKey], *, load: bool) -> None:
        """Store or load chunks, job by job, and step until nothing is left to be done."""
        free, used = [range(JOB), range(JOB, 2 * JOB)], dict[int, range]()
        parts = [wanted[start : start + JOB] for start in range(0, len(wanted), JOB)]
        while parts or used or self.tier.has_pending_work():
            while parts and free:
                part, rows = parts.pop(0), free.pop()
                job = self.submit(part, rows[: len(part)], load=load)
                used[job] = rows
            for result in self.tier.get_finished_jobs():
                free.append(used.pop(result.job_id))
            self.publish()
            time.sleep(0.001)


def main() -> None:
    engine = PublishingEngine(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        match line.split():
            case ["hello"]:
                engine.publish()
            case [("store" | "load") as kind, first, count]:
                engine.run(keys(int(count), start=int(first)), load=kind == "load")
        print("done", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
