"""Writers that go on until their server is gone, and whether it has kept what it acknowledged to
them."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

from hicache_metadata_server.protocol import Fsck, FsckReport
from tests.support.metadata import HttpClient, Unanswered, V2Scope

# So many that nothing is evicted.
SLOTS = 1_000_000


class Writer(threading.Thread):
    """Stores and deletes batches until the server is gone, and remembers what it was told."""

    def __init__(self, url, number):
        super().__init__(daemon=True)
        self.chance, self.number = random.Random(number), number
        self.client = HttpClient(url)
        self.live, self.gone, self.unsure = {}, [], set()

    def run(self):
        scope = V2Scope(self.client, "0:kv", SLOTS, 4096, self.chance)
        with suppress(Unanswered):
            for batch in range(10_000):
                count = self.chance.choice((1, 16, 128))
                keys = [f"{self.number}-{batch}-{i}" for i in range(count)]
                self.unsure = set(keys)
                pages = scope.store(keys)
                self.live |= {page.key: (page.slot, page.checksum) for page in pages}
                self.unsure = set()
                if self.chance.random() < 0.3:
                    gone = self.chance.sample(list(self.live), min(len(self.live), 20))
                    self.unsure = set(gone)
                    scope.delete(gone)
                    for key in gone:
                        del self.live[key]
                    self.gone += gone
                    self.unsure = set()


def check_kept(scope, writers):
    """All that was acknowledged is there, each page in a slot of its own, and the server finds
    nothing wrong."""
    slots = []
    for writer in writers:
        keys = [key for key in writer.live if key not in writer.unsure]
        # A fast machine writes more in the time than one request may ask for.
        for start in range(0, len(keys), 4000):
            some = keys[start : start + 4000]
            found = scope.lookup(some)
            pages = list(zip(found.slots, found.checksums, strict=True))
            assert pages == [writer.live[key] for key in some]
            slots += found.slots
        assert not any(slot >= 0 for slot in scope.lookup(writer.gone[:4000]).slots)
    assert len(set(slots)) == len(slots)
    assert scope.client.call("/v2/fsck", Fsck(), FsckReport).problems == []
