"""Writers that go on until their server is gone, and whether it has kept what it acknowledged to
them."""

from __future__ import annotations

import random
import threading

from hicache_metadata_server.protocol import Fsck, FsckReport, Reserved
from tests.support.metadata import HttpClient, Unanswered, V2Client, V2Scope

# So many that nothing is evicted.
SLOTS = 1_000_000


class Writer(threading.Thread):
    """Stores and deletes batches until the server is gone, and remembers what it was told."""

    def __init__(self, url, number):
        super().__init__(daemon=True)
        self.chance, self.wire, self.number = (
            random.Random(number),
            HttpClient(url, answer_seconds=60.0),
            number,
        )
        self.live, self.gone, self.unsure = {}, [], set()

    def run(self):
        scope = V2Scope(V2Client(self.wire), "0:kv", SLOTS, 4096, self.chance)
        try:
            for batch in range(10_000):
                keys = [
                    f"{self.number}-{batch}-{i}" for i in range(self.chance.choice((1, 16, 128)))
                ]
                self.unsure = set(keys)
                leased = scope.reserve(keys)
                assert set(leased.states) == {Reserved.LEASED}
                sums = [self.chance.getrandbits(64) for _ in keys]
                done = scope.commit(leased.leases, [1] * len(keys), sums)
                assert all(done)
                self.live |= {
                    key: (slot, total)
                    for key, slot, total in zip(keys, leased.slots, sums, strict=True)
                }
                self.unsure = set()
                if self.chance.random() < 0.3:
                    gone = self.chance.sample(list(self.live), min(len(self.live), 20))
                    self.unsure = set(gone)
                    scope.delete(gone)
                    for key in gone:
                        del self.live[key]
                    self.gone += gone
                    self.unsure = set()
        except Unanswered:
            pass
        finally:
            self.wire.close()


def check_kept(scope, writers):
    """All that was acknowledged is there, each page in a slot of its own, and the server finds
    nothing wrong."""
    owners = {}
    for writer in writers:
        keys = [key for key in writer.live if key not in writer.unsure]
        # A fast machine writes more in the time than one request may ask for.
        for start in range(0, len(keys), 10_000):
            some = keys[start : start + 10_000]
            found = scope.lookup(some)
            assert list(zip(found.slots, found.checksums, strict=True)) == [
                writer.live[key] for key in some
            ]
            owners |= {
                slot: key for slot, key in zip(found.slots, some, strict=True) if slot not in owners
            }
        assert not any(slot >= 0 for slot in scope.lookup(writer.gone[:10_000]).slots)
    assert len(owners) == sum(len(set(writer.live) - writer.unsure) for writer in writers)
    assert scope.client.call("/v2/fsck", Fsck(), FsckReport).problems == []
