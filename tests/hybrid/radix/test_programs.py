"""Random programs of requests, evictions, copies and prefetches: no slot is lost or shared, every
byte is where it belongs."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.radix import CacheInUseError, StalePrefixError
from hicache_storage.hybrid.storage_io.workers import Job
from tests.hybrid.radix.controller import WorldController
from tests.hybrid.radix.world import SIZES, World
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=25)

FACTOR = int(os.environ.get("HICACHE_PROGRAMS", "1"))
"""How many times as many programs are run as in the unit suite, and longer ones: by `make fuzz`."""
PAGE = 2
PICKS = st.integers(0, 63)
"""Which one, of however many there are. How many depends on how far other threads are, and what is
drawn must not."""
CHAINS = [
    ((1, 2), (1, 3), (4, 4), (5, 1), (2, 2), (6, 1), (1, 1), (3, 3), (7, 7), (8, 1)),
    ((1, 2), (1, 3), (4, 4), (5, 1), (9, 9), (6, 2), (1, 4), (3, 5)),
    ((1, 2), (1, 3), (4, 5), (5, 5), (2, 3), (6, 6)),
]


@st.composite
def sequences(draw):
    """Sequences that share prefixes, at checkpoints and elsewhere, some with a partial last
    page."""
    chain = draw(st.sampled_from(CHAINS))
    pages = chain[: draw(st.integers(1, len(chain)))]
    return tuple(token for page in pages for token in page) + (9,) * draw(st.booleans())


class Fetches(RuleBasedStateMachine):
    """Programs over a model with states whose prefixes come from the storage; every call is
    followed by a check of everything."""

    grid: int | None = 4

    @initialize(
        policy=st.sampled_from(WritePolicy),
        seed=st.integers(0, 999),
        host=st.sampled_from([12, 20, 48]),
        states=st.integers(1, 6),
        releases=st.booleans(),
    )
    def begin(self, policy, seed, host, states, releases):
        sizes = SIZES | {"host_kv": host, "host_states": states}
        controller = WorldController.of(
            sizes, PAGE, states=self.grid is not None, seed=seed, stop_seconds=0.02
        )
        self.patches = (
            mock.patch.object(
                Job,
                "overdue",
                lambda job, seconds: not job.query() and controller.mood == "hangs",
            ),
            mock.patch("hicache_storage.hybrid.storage_io.prefetch_jobs.BATCH_PAGES", 4),
        )
        for patch in self.patches:
            patch.start()
        self.world = World(controller, PAGE, self.grid, policy, releases_states=releases)
        self.stale = None
        self.locks = []
        self.waiting = []
        self.loses = False
        """Whether pages may go between the question for them and their being read."""

    @rule(tokens=sequences(), more=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def serve(self, tokens, more):
        request = self.world.start(tokens)
        if request and self.world.extend(request, more):
            length = self.world.finish(request)
            assert self.world.cache.match((*tokens, *more)).length >= min(
                length, len(tokens) + len(more) - 1
            )

    @rule(tokens=st.integers(0, 12), states=st.integers(0, 3))
    def evict_host(self, tokens, states):
        self.world.cache.evict_host(tokens, states)

    @rule(
        tokens=sequences(),
        fetch=st.booleans(),
        others=st.tuples(st.integers(0, 6), st.integers(0, 2)),
        loses=st.sampled_from([None, None, "now", "while it is read"]),
    )
    def serve_again(self, tokens, fetch, others, loses):
        """A request that comes back after the device, or all memory, was needed for others."""
        self.store(tokens)
        self.world.cache.evict(10**6, 10**6)
        self.world.settle()
        if fetch:
            self.world.cache.evict_host(10**6, 10**6)
            self.world.take_host(*others)
            if loses:
                self.storage_loses_pages(0.1, loses != "now")
            self.fetch(tokens)
        self.world.start(tokens)

    @rule(tokens=sequences(), kept=st.integers(1, 4))
    def evict_what_more_is_fetched_for(self, tokens, kept):
        """The prefix that a prefetch goes on from was on the device only, and is gone when it
        ends."""
        cache = self.world.cache
        self.store(tokens)
        cache.evict(10**6, 10**6)
        self.world.settle()
        cache.evict_host(10**6, 10**6)
        self.world.visit(tokens[: kept * PAGE * 2 + 1])
        if cache.prefetch_from_storage("more", tokens):
            cache.evict(10**6, 10**6)
            eventually(lambda: cache.poll() or cache.check_prefetch("more"))

    def store(self, tokens):
        """Let two requests use this sequence and half of it, so that every policy writes both, with
        their checkpoints."""
        for end in (len(tokens) // 2, len(tokens)):
            for _ in range(2):
                self.world.visit(tokens[:end])
        self.world.settle()

    def fetch(self, tokens):
        """A prefetch that is waited for; the prefix is not shorter then, and as long as it can
        be."""
        cache = self.world.cache
        before = cache.match(tokens).length
        well = self.world.controller.mood == "well"
        best = max(self.world.fetchable(tokens), default=0) * PAGE if well else None
        if cache.prefetch_from_storage("fetch", tokens):
            eventually(lambda: cache.poll() or cache.check_prefetch("fetch"))
        assert cache.match(tokens).length >= before
        if well and not before and not self.waiting and not self.loses:
            assert cache.match(tokens).length == best

    @rule(share=st.sampled_from([0.1, 0.5, 1.0]), while_read=st.booleans())
    def storage_loses_pages(self, share, while_read):
        self.loses = self.loses or while_read
        self.world.controller.lose(share, while_read=while_read)

    @invariant()
    def all_is_well(self):
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_order()

    def teardown(self):
        """When all is released and evicted, every slot is free."""
        if not hasattr(self, "world"):
            return
        world = self.world
        self.storage_is("well")
        for lock in self.locks:
            world.cache.unlock(lock)
        for request in list(world.running):
            world.running.remove(request)
            world.drop(request)
        world.cache.end_prefetches()
        world.settle()
        assert world.cache.idle()
        world.cache.evict(10**6, 10**6)
        world.settle()
        world.cache.evict_host(10**6, 10**6)
        world.take_host(0, 0)
        assert not list(world.tree)
        world.check()
        assert world.kv_slots.available_size() == world.kv_slots.size
        if world.grid is not None:
            assert world.state_slots.available_size() == world.state_slots.size
        # Copies that a reset has forgotten keep their host slots until they are over.
        eventually(lambda: world.cache.poll() or world.host_is_free())
        world.controller.close()
        for patch in self.patches:
            patch.stop()

    def storage_is(self, mood):
        controller = self.world.controller
        controller.be(mood)
        # As long as calls hang that were given up, others fail at once.
        if mood != "hangs":
            eventually(lambda: not controller.stats().stuck_calls)


class Programs(Fetches):
    """Programs of all that can be done."""

    @rule(tokens=sequences())
    def start(self, tokens):
        self.world.start(tokens)

    @rule(tokens=sequences(), device_only=st.booleans())
    def match(self, tokens, device_only):
        found = self.world.cache.match(tokens, device_only=device_only)
        assert found.length == self.world.best(tokens, device_only=device_only)
        assert found.length == found.device_indices.numel() + found.host_length
        assert not (device_only and found.needs_load)
        if found.length and self.grid:
            assert (found.state_slot is None) == found.state_on_host
        self.stale, self.stale_tokens = found, tokens

    @rule()
    def lock_what_was_matched_before(self):
        found = self.stale
        if found is None:
            return
        try:
            lock = self.world.lock(found, self.stale_tokens)
        except StalePrefixError:
            return
        assert lock.length == found.length
        self.locks.append(lock)

    @rule(pick=PICKS)
    def unlock(self, pick):
        if not self.locks:
            return
        lock = self.locks.pop(pick % len(self.locks))
        self.world.cache.unlock(lock)
        with pytest.raises(StalePrefixError):
            self.world.cache.unlock(lock)

    @rule(pick=PICKS, more=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def decode(self, pick, more):
        if request := self.one_running(pick):
            self.world.extend(request, more)

    @rule(pick=PICKS)
    def finish(self, pick):
        if request := self.one_running(pick):
            self.world.finish(request)

    @rule(pick=PICKS)
    def abort(self, pick):
        if request := self.one_running(pick):
            self.world.running.remove(request)
            self.world.drop(request)

    def one_running(self, pick):
        running = self.world.running
        return running[pick % len(running)] if running else None

    @rule(tokens=st.integers(0, 12), states=st.integers(0, 3))
    def evict(self, tokens, states):
        before = self.world.cache.usage()
        self.world.cache.evict(tokens, states)
        after = self.world.cache.usage()
        freed_tokens = before.device_tokens - after.device_tokens
        freed_states = before.device_states - after.device_states
        assert freed_tokens >= min(tokens, before.evictable_tokens)
        assert freed_states >= min(states, before.evictable_states)

    @rule()
    def poll(self):
        self.world.cache.poll()

    @rule(tokens=sequences())
    def load_and_leave(self, tokens):
        self.world.load_and_leave(tokens)

    @rule(pages=st.integers(0, 8), states=st.integers(0, 3))
    def others_use_the_host(self, pages, states):
        self.world.take_host(pages, states)

    @rule(tokens=sequences())
    def prefetch(self, tokens):
        request_id = f"r{len(self.waiting)}"
        if (
            self.world.cache.prefetch_from_storage(request_id, tokens)
            and request_id not in self.waiting
        ):
            self.waiting.append(request_id)

    @rule(pick=PICKS, stop=st.booleans())
    def wait(self, pick, stop):
        if not self.waiting:
            return
        request_id = self.waiting[pick % len(self.waiting)]
        if stop:
            self.world.cache.end_prefetch(request_id)
        if stop or self.world.cache.check_prefetch(request_id):
            self.waiting.remove(request_id)
            assert self.world.cache.check_prefetch(request_id)

    @rule(mood=st.sampled_from(["well", "is full", "fails", "hangs"]))
    def storage_is(self, mood):
        super().storage_is(mood)

    @rule(same=st.booleans())
    def detach_and_attach(self, same):
        cache, controller = self.world.cache, self.world.controller
        cache.end_prefetches()
        self.waiting.clear()
        controller.detach()
        assert not cache.prefetch_from_storage("nobody", (1, 2, 1, 3))
        cache.poll()
        self.storage_is("well")
        controller.attach(empty=not same)
        cache.storage_changed()

    @rule(sure=st.integers(0, 7))
    def reset(self, sure):
        if self.world.running or self.locks:
            with pytest.raises(CacheInUseError):
                self.world.cache.reset()
            return
        if sure:
            return
        self.world.cache.reset()
        self.waiting.clear()
        self.stale = None
        usage = self.world.cache.usage()
        assert not usage.device_tokens
        assert not usage.host_states
        eventually(lambda: self.world.cache.poll() or self.world.cache.idle())


class StatelessPrograms(Programs):
    """The same for a model that can go on after every page."""

    grid = None


def machine(kind, examples):
    """The test case of a state machine, to be run with so many programs in the unit suite."""
    case = kind.TestCase
    case.settings = settings(
        max_examples=examples * FACTOR,
        stateful_step_count=30 if FACTOR == 1 else 60,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return pytest.mark.timeout(300 * FACTOR)(case)


TestFetches = machine(Fetches, 15)
TestPrograms = machine(Programs, 40)
TestStatelessPrograms = machine(StatelessPrograms, 25)
