"""A server that is killed with -9 and started again at random instants under load."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import AdminClient
from tests.backends.hf3fs.harness import Rig, chain, content

pytestmark = pytest.mark.slow(seconds=25)

DEADLINE_SECONDS = 1.0
SLACK_SECONDS = 1.0 if "HICACHE_RACE_SECONDS" in os.environ else 20.0
"""For a machine that is busy with something else: less than what the calls of a load would add up
to without deadlines."""
PATIENCE_SECONDS = 60.0
LONGEST = 16
SHARED = 40
"""Chains that all workers write, so that some write one page at the same time."""


@dataclass
class Ledger:
    """What all workers have been told, and what was wrong. Safe for many threads."""

    acknowledged: dict[str, None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    hits: int = 0
    longest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, keys, answers):
        with self.lock:
            self.acknowledged.update(
                dict.fromkeys(key for key, ok in zip(keys, answers, strict=True) if ok)
            )

    def some(self, chance, count):
        """Keys that were acknowledged to anybody, as a reader asks for them."""
        with self.lock:
            return chance.sample(list(self.acknowledged), min(count, len(self.acknowledged)))

    def read(self, keys, found, page_bytes):
        wrong = [
            key
            for key, page in zip(keys, found, strict=True)
            if page not in (None, content(key, 0, page_bytes))
        ]
        with self.lock:
            self.wrong += [f"wrong bytes for {key}" for key in wrong]
            self.hits += len(found) - found.count(None)

    def took(self, what, seconds):
        with self.lock:
            self.longest = max(self.longest, seconds)
            if seconds > DEADLINE_SECONDS + SLACK_SECONDS:
                self.wrong.append(
                    f"{what} took {seconds:.2f} s, with a deadline of {DEADLINE_SECONDS} s"
                )


class Worker(threading.Thread):
    """An engine of its own: sets, gets and asks, each with a deadline."""

    def __init__(
        self, number: int, rig: Rig, ledger: Ledger, seed: int, over: threading.Event
    ) -> None:
        super().__init__(name=f"worker-{number}")
        self.number, self.rig, self.ledger, self.over = number, rig, ledger, over
        self.chance = random.Random(f"{seed}/{number}")
        self.turns = 0

    def run(self):
        try:
            while not self.over.is_set():
                self.turn()
                self.turns += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what must not happen
            self.ledger.wrong.append(f"{self.name}: {type(error).__name__}: {error}")

    def turn(self):
        chance, begin = self.chance, time.monotonic()
        what = chance.choice(("set", "set", "get", "get", "exists"))
        if what == "set":
            shared = chance.random() < 0.3
            name = f"shared-{chance.randrange(SHARED)}" if shared else f"{self.number}-{self.turns}"
            keys = chain(name, chance.randint(1, LONGEST))
            self.ledger.stored(keys, self.rig.put(keys, seconds=DEADLINE_SECONDS))
        else:
            keys = self.ledger.some(chance, LONGEST)
            if what == "get":
                self.ledger.read(
                    keys, self.rig.get(keys, seconds=DEADLINE_SECONDS), self.rig.page_bytes
                )
            else:
                assert 0 <= self.rig.hits(keys, seconds=DEADLINE_SECONDS) <= len(keys)
        self.ledger.took(what, time.monotonic() - begin)


@pytest.mark.parametrize("seed", [1])
def test_a_server_killed_at_random_instants_loses_nothing(rig, server, race_seconds, seed):
    """No acknowledged page is lost, no byte is wrong, no call raises or takes longer than it
    may."""
    store = {"metadata_url": server.url, "file_size": "1GiB", "lease_seconds": 1.0}
    chance, ledger, over = random.Random(seed), Ledger(), threading.Event()
    workers = [Worker(number, rig(**store), ledger, seed, over) for number in range(3)]
    for worker in workers:
        worker.rig.storage.open()
        worker.start()
    kills, until = 0, time.monotonic() + max(5.0, race_seconds)

    def enough():
        return (
            kills >= 2
            and len(ledger.acknowledged) > 100
            and ledger.hits > 100
            and all(worker.turns for worker in workers)
        )

    while time.monotonic() < until or not enough():
        assert time.monotonic() < until + PATIENCE_SECONDS, ledger.wrong
        time.sleep(chance.uniform(0.02, 1.0))
        server.kill()
        kills += 1
        time.sleep(chance.choice((0.0, chance.uniform(0.0, 0.5))))
        server.start()
    # Also under load: what the restarted server knows is asked for at once.
    time.sleep(0.5)
    over.set()
    for worker in workers:
        worker.join(PATIENCE_SECONDS)
        assert not worker.is_alive()
    assert ledger.wrong == []
    kept = list(ledger.acknowledged)
    lost = _missing(rig(**store), kept)
    assert lost == [], f"{len(lost)} of {len(kept)} acknowledged pages are lost after {kills} kills"
    checked = AdminClient(server.url).call("/v2/fsck", p.Fsck(), p.FsckReport)
    assert checked.problems == []


def _missing(fresh, keys):
    missing = []
    for start in range(0, len(keys), 32):
        batch = keys[start : start + 32]
        found = fresh.get(batch)
        for key, page in zip(batch, found, strict=True):
            assert page in (None, content(key, 0, fresh.page_bytes))
        missing += [key for key, page in zip(batch, found, strict=True) if page is None]
    return missing
