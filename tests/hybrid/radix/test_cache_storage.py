"""What the cache does with a storage below: what comes back from there, and what goes there once,
or once more."""

from __future__ import annotations

from hicache_storage.hybrid import WritePolicy, namespace_seed
from tests.hybrid.radix.serving import LONG, PAGE, fetch, served
from tests.hybrid.radix.world import KV, MAMBA, kv_values, value
from tests.support.waiting import eventually


def forget(world):
    world.settle()
    world.cache.evict(100, 100)
    world.settle()
    world.cache.evict_host(100, 100)
    assert not world.cache.match(LONG).length


def test_a_prefix_comes_back_in_its_namespace_only(world):
    seed = namespace_seed("adapter")
    rows, state = world.cache.alloc_kv(4), world.cache.alloc_state()
    world.device[KV][rows], world.device[MAMBA][state] = kv_values(LONG[:4]), value("s", LONG[:4])
    world.cache.insert(LONG[:4], rows, {4: int(state)}, namespace=seed)
    for _ in range(2):
        world.settle()
        world.cache.evict(100, 100)
    world.cache.evict_host(100, 100)
    for namespace, length in ((None, 0), (namespace_seed("other"), 0), (seed, 4)):
        if world.cache.prefetch_from_storage("r", LONG[:5], namespace=namespace):
            eventually(lambda: world.cache.poll() or world.cache.check_prefetch("r"))
        assert world.cache.match(LONG[:4], namespace=namespace).length == length
    world.cache.reset()


def test_eviction_is_tried_before_anything_is_cut(make_world):
    world = make_world(host_kv=18, grid=4)
    served(world, LONG, 4)
    forget(world)
    served(world, tuple(range(80, 88)))
    world.cache.evict(100, 100)
    assert world.controller.host_slots[KV].available_size() == 5 * PAGE
    fetch(world, LONG)
    assert world.cache.match(LONG).host_length == 16


def test_what_was_fetched_is_not_backed_up_again(world):
    served(world, LONG)
    forget(world)
    fetch(world, LONG)
    backed_up = world.controller.stats().pages_backed_up
    lock = world.cache.lock(world.cache.match(LONG))
    world.cache.unlock(lock)
    world.settle()
    assert world.controller.stats().pages_backed_up == backed_up


def test_a_prefetch_hangs_below_a_prefix_that_only_the_device_had(make_world):
    """Its path is copied to the host first, or the prefix there would have a hole."""
    world = make_world(policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    for _ in range(2):
        served(world, LONG, 8)
    forget(world)
    served(world, LONG[:8])
    assert world.cache.usage().host_tokens == 0
    fetch(world, LONG)
    world.settle()
    match = world.cache.match(LONG)
    assert (match.length, match.host_length) == (16, 8)


def test_a_prefetch_does_not_wait_for_room_for_the_state_before_it(make_world):
    """The only state slot of the host is the fetched state's; the prefix needs its KV there, and no
    state."""
    world = make_world(policy=WritePolicy.WRITE_THROUGH_SELECTIVE, host_states=1)
    for _ in range(2):
        served(world, LONG, 8)
    forget(world)
    served(world, LONG[:8])
    fetch(world, LONG)
    assert world.cache.match(LONG).length == 16
    assert world.cache.usage().dropped_tokens == 0


def test_what_was_fetched_is_given_up_if_its_prefix_went(make_world):
    world = make_world(policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    for _ in range(2):
        served(world, LONG, 8)
    forget(world)
    served(world, LONG[:8])
    free = world.controller.host_slots[KV].available_size()
    assert world.cache.prefetch_from_storage("r", LONG)
    world.cache.evict(100, 100)
    eventually(lambda: world.cache.poll() or world.cache.check_prefetch("r"))
    assert world.cache.match(LONG).length == 0
    assert world.cache.usage().dropped_tokens == 8
    eventually(lambda: world.controller.host_slots[KV].available_size() == free)


def test_a_backup_that_failed_is_tried_again_with_the_next_use(world):
    world.controller.be("is full")
    served(world, LONG)
    world.controller.be("well")
    forget(world)
    fetch(world, LONG)
    assert world.cache.match(LONG).length == 0
    served(world, LONG)
    lock = world.cache.lock(world.cache.match(LONG))
    world.cache.unlock(lock)
    forget(world)
    fetch(world, LONG)
    assert world.cache.match(LONG).length == 16


def test_a_copy_that_ends_before_the_one_above_it_is_stored_with_that(world, monkeypatch):
    """Nothing was stored of its node, as long as nobody used it: a miss once it was evicted."""
    ended, tickets = world.controller.completed_writes, list[int]()

    def completed():
        """The last of them first, one by one."""
        tickets.extend(ended())
        return [tickets.pop()] if tickets else []

    monkeypatch.setattr(world.controller, "completed_writes", completed, raising=False)
    served(world, LONG, 8)
    forget(world)
    fetch(world, LONG)
    assert world.cache.match(LONG).length == 16


def grow(world, tokens):
    """A request whose answer is a page longer each time; the tokens of the conversation then."""
    served(world, (*tokens, tokens[-1] + 1, tokens[-1] + 2))
    return (*tokens, tokens[-1] + 1, tokens[-1] + 2)


def test_a_storage_that_keeps_nothing_makes_no_storm(world):
    """Every time something is stored, all before it is missing; it is not written for ever."""
    tokens, came = LONG, 0
    for _ in range(8):
        tokens = grow(world, tokens)
        world.controller.lose(1.0, while_read=False)
        usage = world.cache.usage()
        assert usage.tokens_stored_again <= usage.host_tokens
        came = max(came, usage.tokens_stored_again)
    assert came


def test_a_state_that_had_to_be_computed_again_is_stored_again(world):
    """Its KV is cached; the state was evicted everywhere and the storage has lost it."""
    served(world, LONG)
    world.cache.evict(0, 100)
    world.cache.evict_host(0, 100)
    world.controller.lose(1.0, while_read=False)
    assert world.cache.match(LONG).length == 0
    assert world.cache.usage().host_tokens
    served(world, LONG)
    forget(world)
    fetch(world, LONG)
    assert world.cache.match(LONG).length == 16
