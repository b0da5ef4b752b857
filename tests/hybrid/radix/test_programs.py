"""Random programs of requests, evictions, copies and prefetches: no slot is lost or shared, every byte is where it belongs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.radix import CacheInUseError, StalePrefixError
from tests.hybrid.radix.real import RealController
from tests.hybrid.radix.standin import StandInController
from tests.hybrid.radix.world import SIZES, World
from tests.hybrid.waiting import until

PAGE = 2
STORIES = [
    ((1, 2), (1, 3), (4, 4), (5, 1), (2, 2), (6, 1), (1, 1), (3, 3), (7, 7), (8, 1)),
    ((1, 2), (1, 3), (4, 4), (5, 1), (9, 9), (6, 2), (1, 4), (3, 5)),
    ((1, 2), (1, 3), (4, 5), (5, 5), (2, 3), (6, 6)),
]


@st.composite
def sequences(draw):
    """Sequences that share prefixes, at checkpoints and elsewhere, some with a partial last page."""
    story = draw(st.sampled_from(STORIES))
    pages = story[: draw(st.integers(1, len(story)))]
    return tuple(token for page in pages for token in page) + (9,) * draw(st.booleans())


class Programs(RuleBasedStateMachine):
    """Programs over a model with states; every call is followed by a check of everything."""

    grid: int | None = 4
    controller = StandInController

    @initialize(
        policy=st.sampled_from(WritePolicy),
        seed=st.integers(0, 999),
        host=st.sampled_from([12, 20, 48]),
        states=st.integers(1, 6),
        releases=st.booleans(),
    )
    def begin(self, policy, seed, host, states, releases):
        sizes = SIZES | {"host_kv": host, "host_states": states}
        controller = self.controller(sizes, PAGE, states=self.grid is not None, seed=seed)
        self.world = World(controller, PAGE, self.grid, policy, releases)
        self.stale = None
        self.locks = []
        self.waiting = []

    @rule(tokens=sequences())
    def start(self, tokens):
        self.world.start(tokens)

    @rule(tokens=sequences(), more=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def serve(self, tokens, more):
        request = self.world.start(tokens)
        if request and self.world.extend(request, more):
            length = self.world.finish(request)
            assert self.world.cache.match((*tokens, *more)).length >= min(length, len(tokens) + len(more) - 1)

    @rule(tokens=sequences(), device_only=st.booleans())
    def match(self, tokens, device_only):
        found = self.world.cache.match(tokens, device_only=device_only)
        assert found.length == self.world.best(tokens, device_only=device_only)
        assert found.length == found.device_indices.numel() + found.host_length
        assert not (device_only and found.needs_load)
        if found.length and self.grid:
            assert (found.state_slot is None) == found.state_on_host
        self.stale = found

    @precondition(lambda self: self.stale is not None)
    @rule()
    def lock_what_was_matched_before(self):
        cache, found = self.world.cache, self.stale
        try:
            lock = cache.lock(found)
        except StalePrefixError:
            return
        assert lock.length == found.length
        self.locks.append(lock)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        lock = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.world.cache.unlock(lock)
        with pytest.raises(StalePrefixError):
            self.world.cache.unlock(lock)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), more=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def decode(self, data, more):
        request = data.draw(st.sampled_from(self.world.running))
        if not self.world.extend(request, more):
            self.world.running.remove(request)
            self.world.drop(request)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def finish(self, data):
        self.world.finish(data.draw(st.sampled_from(self.world.running)))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.world.running))
        self.world.running.remove(request)
        self.world.drop(request)

    @rule(tokens=st.integers(0, 12), states=st.integers(0, 3))
    def evict(self, tokens, states):
        before = self.world.cache.usage()
        evicted = self.world.cache.evict(tokens, states)
        after = self.world.cache.usage()
        assert before.device_tokens - after.device_tokens == evicted.tokens
        assert before.device_states - after.device_states == evicted.states
        assert evicted.tokens >= min(tokens, before.evictable_tokens)
        assert evicted.states >= min(states, before.evictable_states)

    @rule(tokens=st.integers(0, 12), states=st.integers(0, 3))
    def evict_host(self, tokens, states):
        before = self.world.cache.usage()
        evicted = self.world.cache.evict_host(tokens, states)
        after = self.world.cache.usage()
        assert before.host_tokens - after.host_tokens == evicted.tokens
        assert before.host_states - after.host_states == evicted.states

    @rule()
    def poll(self):
        self.world.cache.poll()

    @rule(tokens=sequences(), fetch=st.booleans())
    def serve_again(self, tokens, fetch):
        """A request that comes back after the device, or all memory, was needed for others."""
        world = self.world
        world.settle()
        world.cache.evict(10**6, 10**6)
        world.settle()
        if fetch:
            world.cache.evict_host(10**6, 10**6)
            self.fetch(tokens)
        world.start(tokens)

    def fetch(self, tokens):
        """A prefetch that is waited for; the prefix is not shorter then."""
        cache = self.world.cache
        before = cache.match(tokens).length
        if cache.prefetch_from_storage("fetch", tokens):
            until(lambda: cache.check_prefetch("fetch"))
        assert cache.match(tokens).length >= before

    @rule(tokens=sequences())
    def prefetch(self, tokens):
        request_id = f"r{len(self.waiting)}"
        if self.world.cache.prefetch_from_storage(request_id, tokens) and request_id not in self.waiting:
            self.waiting.append(request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), stop=st.booleans())
    def wait(self, data, stop):
        request_id = data.draw(st.sampled_from(self.waiting))
        if stop:
            self.world.cache.end_prefetch(request_id)
        if stop or self.world.cache.check_prefetch(request_id):
            self.waiting.remove(request_id)
            assert self.world.cache.check_prefetch(request_id)

    @rule(refuse=st.booleans())
    def storage_falters(self, refuse):
        self.world.controller.refuse_backups = refuse

    @rule(same=st.booleans())
    def detach_and_attach(self, same):
        cache, controller = self.world.cache, self.world.controller
        cache.end_prefetches()
        self.waiting.clear()
        controller.detach()
        assert not cache.prefetch_from_storage("nobody", (1, 2, 1, 3))
        cache.poll()
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
        assert self.world.cache.idle()

    @invariant()
    def all_is_well(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """When all is released and evicted, every slot is free."""
        if not hasattr(self, "world"):
            return
        world = self.world
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
        assert not list(world.tree)
        world.check()
        assert world.kv_slots.available_size() == world.kv_slots.size
        world.controller.close()


class StatelessPrograms(Programs):
    """The same for a model that can go on after every page."""

    grid = None


class RealPrograms(Programs):
    """The same on the real controller, with copies on simulated streams and a storage in a dict."""

    controller = RealController


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPrograms = Programs.TestCase
TestPrograms.settings = SETTINGS
TestStatelessPrograms = StatelessPrograms.TestCase
TestStatelessPrograms.settings = SETTINGS
TestRealPrograms = RealPrograms.TestCase
TestRealPrograms.settings = settings(SETTINGS, max_examples=8)
