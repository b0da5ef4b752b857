"""Random programs on one rank, with a storage that fails and hangs: no slot is lost or handed out
twice, no byte is wrong."""

from __future__ import annotations

import threading
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import StorageUnavailableError
from hicache_storage.testing import MemoryStorage
from tests.hybrid.programs import PICKS, machine
from tests.hybrid.stack import KV, MAMBA, PAGE, Stack, hashes, identity
from tests.support.waiting import eventually

CHAINS = {seed: hashes(8, seed) for seed in range(3)}
SPANS = st.tuples(st.sampled_from(sorted(CHAINS)), st.integers(1, 8), st.sets(st.integers(1, 8)))


class Moody:
    """Decides what the calls of a storage meet; a call that hangs goes on when the mood changes."""

    def __init__(self):
        self._changed = threading.Condition()
        self.mood = "well"

    def be(self, mood):
        with self._changed:
            self.mood = mood
            self._changed.notify_all()

    def __call__(self, operation):
        with self._changed:
            if self.mood == "fails":
                raise StorageUnavailableError("down")
            if operation != "connect":
                assert self._changed.wait_for(lambda: self.mood != "hangs", 60)


class Programs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.mood, self.objects = Moody(), {}
        self.patches = (
            mock.patch.object(
                Job, "overdue", lambda job, seconds: not job.query() and self.mood.mood == "hangs"
            ),
            mock.patch("hicache_storage.hybrid.storage_io.prefetch_jobs.BATCH_PAGES", 4),
        )
        for patch in self.patches:
            patch.start()
        self.stack = Stack(pages=16, states=4, stop_seconds=0.02)
        self.controller = self.stack.controller
        self.owned = []
        """Host spans with their keys, all written."""
        self.backups, self.prefetches, self.nodes = {}, [], 0

    def teardown(self):
        self.mood.be("well")
        self.controller.close()
        for host, _ in self.owned:
            self.controller.free_host(host)
        eventually(lambda: self.stack.free() == self.stack.total())
        eventually(lambda: self.controller.stats().stuck_calls == 0)
        self.stack.close()
        for patch in self.patches:
            patch.stop()
        assert not self.stack.simulator.races

    # The storage
    # -------------------------------------------------------------------------------------------------

    @rule(mood=st.sampled_from(["well", "fails", "hangs"]))
    def storage_is(self, mood):
        self.mood.be(mood)

    @rule()
    def attach(self):
        if self.controller.attached:
            return
        storage = MemoryStorage(identity(), self.objects)
        storage.before = self.mood
        fails = self.mood.mood == "fails"
        try:
            self.controller.attach(storage)
        except StorageUnavailableError:
            assert fails
        assert self.controller.attached is not fails

    @rule()
    def detach(self):
        self.controller.detach()
        self.told()
        assert self.backups == {}

    @rule()
    def reset(self):
        self.controller.reset()
        self.backups = {}
        assert self.controller.backups.completed() == []

    # Pages
    # -------------------------------------------------------------------------------------------------------

    @rule(span=SPANS)
    def write(self, span):
        seed, pages, ends = span
        device = self.stack.take("device", pages, sorted(end for end in ends if end <= pages))
        self.stack.fill("device", device, CHAINS[seed])
        self.nodes += 1
        free = self.stack.free()
        host = self.controller.write(device, self.nodes)
        assert (host is None) <= (free[KV] < pages * PAGE or free[MAMBA] < len(device.endpoints))
        if host is not None:
            self.controller.start_writing()
            assert eventually(self.controller.completed_writes) == [self.nodes]
            self.owned.append((host, CHAINS[seed]))
        self.stack.give("device", device)

    @rule(pick=PICKS)
    def load(self, pick):
        if not self.owned:
            return
        host, keys = self.owned[pick % len(self.owned)]
        device = self.controller.load(host, [0])
        assert device is not None
        self.controller.start_loading().synchronize()
        assert eventually(self.controller.completed_loads) == [0]
        assert self.stack.holds("device", device, keys)
        self.stack.give("device", device)

    @rule(pick=PICKS)
    def free(self, pick):
        if self.owned:
            host, _ = self.owned.pop(pick % len(self.owned))
            self.controller.free_host(host)

    @rule(pick=PICKS)
    def back_up(self, pick):
        if not self.owned:
            return
        host, keys = self.owned[pick % len(self.owned)]
        pages = host.kv.numel() // PAGE
        self.backups[self.controller.backups.begin(host, keys[:pages])] = pages

    @rule()
    def told(self):
        for result in self.controller.backups.completed():
            pages = self.backups.pop(result.operation_id)
            assert 0 <= result.stored_pages <= pages
            assert result.stored_pages == pages or not result.complete

    @rule(seed=st.sampled_from(sorted(CHAINS)), pages=st.integers(1, 8))
    def prefetch(self, seed, pages):
        operation = self.controller.prefetcher.begin("r", hashes(pages, seed))
        assert operation is None or self.controller.attached
        if operation is not None:
            self.prefetches.append((operation, CHAINS[seed]))

    @rule()
    def advance(self):
        self.controller.prefetcher.advance()

    @rule(pick=PICKS, waits=st.booleans())
    def terminate(self, pick, waits):
        if not self.prefetches:
            return
        operation, keys = self.prefetches.pop(pick % len(self.prefetches))
        if waits:
            eventually(lambda: operation.poll() and operation.done)
        result = self.controller.prefetcher.terminate(operation)
        if result.tokens:
            assert result.endpoints == (result.tokens // PAGE,)
            self.owned.append((result, keys))

    # What always holds
    # -------------------------------------------------------------------------------------------

    @invariant()
    def every_slot_has_one_owner(self):
        for name in (KV, MAMBA):
            slots = [
                slot
                for host, _ in self.owned
                for slot in self.stack.group.owned(host).get(name, host.kv[:0]).tolist()
            ]
            assert len(slots) == len(set(slots))
            assert len(slots) + self.stack.free()[name] <= self.stack.total()[name]

    @invariant()
    def every_byte_is_its_owners(self):
        for host, keys in self.owned:
            assert self.stack.holds("host", host, keys)


TestPrograms = machine(Programs, 25)
