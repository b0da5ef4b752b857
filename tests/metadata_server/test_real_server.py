"""Real server processes: kill -9 under load, ends in good order, and the whole conformance suite."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from hicache_conformance.metadata.native import NativeScope
from hicache_conformance.metadata.wire import Unanswered, Wire
from hicache_conformance.verdict import Verdict
from hicache_metadata_server.protocol import Checked, Fsck, Reserved
from tests.conformance.metadata.judging import broken, errors, judged
from tests.metadata_server.servers import DURABLE, SERVE, Served, served
from tests.metadata_server.token_files import write_tokens

# So many that nothing is evicted.
SLOTS = 1_000_000
# A lease that ends before it is committed would be no loss.
LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 0.2 --lease-seconds 300"


class Writer(threading.Thread):
    """Stores and deletes batches until the server is gone, and remembers what it was told."""

    def __init__(self, url, number):
        super().__init__(daemon=True)
        self.chance, self.wire, self.number = random.Random(number), Wire(url, answer_seconds=60.0), number
        self.live, self.unsure = {}, set()

    def run(self):
        from hicache_conformance.metadata.native import NativeClient

        scope = NativeScope(NativeClient(self.wire), "0:kv", SLOTS, 4096, self.chance)
        try:
            for batch in range(10_000):
                keys = [f"{self.number}-{batch}-{i}" for i in range(self.chance.choice((1, 16, 128)))]
                self.unsure = set(keys)
                leased = scope.reserve(keys)
                assert set(leased.states) == {Reserved.LEASED}
                sums = [self.chance.getrandbits(64) for _ in keys]
                done = scope.commit(leased.leases, [1] * len(keys), sums)
                assert all(done)
                self.live |= {key: (slot, total) for key, slot, total in zip(keys, leased.slots, sums, strict=True)}
                self.unsure = set()
                if self.chance.random() < 0.3:
                    gone = self.chance.sample(list(self.live), min(len(self.live), 20))
                    self.unsure = set(gone)
                    scope.delete(gone)
                    for key in gone:
                        del self.live[key]
                    self.unsure = set()
        except Unanswered:
            pass
        finally:
            self.wire.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_acknowledged_change_survives_kill_9(seed):
    chance = random.Random(seed)
    with served(LASTING) as (place, client):
        scope = NativeScope(client, "0:kv", SLOTS, 4096, chance)
        scope.initialize()
        writers = [Writer(place.url, number) for number in range(3)]
        for writer in writers:
            writer.start()
        time.sleep(chance.uniform(0.3, 1.5))
        place.kill()
        for writer in writers:
            writer.join()
        place.start()
        client.wire.drop()
        owners = {}
        for writer in writers:
            assert writer.live or writer.unsure, "a writer got nothing done before the kill"
            keys = [key for key in writer.live if key not in writer.unsure]
            # A fast machine writes more in the time than one request may ask for.
            for start in range(0, len(keys), 10_000):
                some = keys[start : start + 10_000]
                found = scope.lookup(some)
                assert list(zip(found.slots, found.checksums, strict=True)) == [writer.live[key] for key in some]
                owners |= {slot: key for slot, key in zip(found.slots, some, strict=True) if slot not in owners}
        assert len(owners) == sum(len(set(writer.live) - writer.unsure) for writer in writers)
        assert client.call("/v2/fsck", Fsck(), Checked).problems == []


def test_sigterm_answers_what_was_accepted_and_keeps_it():
    with served() as (place, client):
        scope = NativeScope(client, "0:kv", SLOTS, 4096, random.Random(1))
        scope.initialize()
        pages = scope.store(["a", "b"])
        place._process.send_signal(signal.SIGTERM)
        place._process.wait(60)
        place.kill()
        place.start()
        client.wire.drop()
        assert scope.lookup(["a", "b"]).slots == [page.slot for page in pages]


def test_a_second_server_on_the_same_store_says_so(tmp_path):
    command = f"{SERVE} --store sqlite:///{tmp_path}/m.db"
    with served(command):
        from hicache_conformance.metadata.server import CannotStartError

        with pytest.raises(CannotStartError, match="another server has this store"), Served(command=command):
            pass


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens", a="admin all", b="read look", c="write write")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in (2, 3))])
def test_our_server_conforms_with_nothing_untested(seed, tokens):
    with Served(command=f"{DURABLE} --token-file {tokens}") as place:
        judgement = judged(place, seed=seed, tokens=True)
    assert errors(judgement) == []
    assert broken(judgement) == {}
    assert judgement.verdict is Verdict.CONFORMANT
    assert {str(result.outcome) for result in judgement.rules} == {"pass"}


def test_with_fsync_too():
    with Served(command=f"{DURABLE} --durability machine") as place:
        judgement = judged(place, seed=4, cases=["restart", "kill", "retry", "history", "histories"])
    assert errors(judgement) == []
    assert broken(judgement) == {}
