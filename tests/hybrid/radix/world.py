"""An engine in miniature over a cache, whose every row says which tokens it belongs to, and what
must always be true."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, field

import torch

from hicache_storage.hybrid.hashing import page_hashes
from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.radix import HiMambaRadixCache
from hicache_storage.hybrid.radix.tree import SlotKind
from hicache_storage.spec import PoolName
from tests.support.waiting import eventually

KV, MAMBA = PoolName.KV, PoolName.MAMBA
SIZES = {"device_kv": 40, "device_states": 6, "host_kv": 48, "host_states": 6}


@functools.lru_cache(maxsize=1 << 16)
def value(kind, tokens) -> int:
    """What the row of the last token, or the state after it, holds: it depends on all tokens
    before."""
    text = f"{kind}:{','.join(map(str, tokens))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def kv_values(tokens, start=0, label=""):
    return torch.tensor(
        [value(f"{label}kv", tokens[: end + 1]) for end in range(start, len(tokens))],
        dtype=torch.int64,
    )


@dataclass(eq=False)
class Running:
    """A request on the device."""

    tokens: tuple[int, ...]
    rows: torch.Tensor
    """Slots of all its tokens, whole pages; the first `cached` are the cache's."""
    cached: int
    state: torch.Tensor | None
    lock: object


@dataclass
class World:
    """The cache, the controller under it, and the requests above."""

    controller: object
    page: int = 2
    grid: int | None = 4
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    label: str = ""
    """Whose bytes: ranks hold others of the same tokens."""
    releases_states: bool = False
    """Whether a request gives a matched state free as soon as it has a copy."""
    running: list[Running] = field(default_factory=list)
    others: dict[PoolName, torch.Tensor] = field(default_factory=dict)
    """Host slots that somebody else uses."""
    clock: int = 0
    used: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, int]] = field(default_factory=dict)
    """For a prefix on a tier, what holds the state after it, and when that was last used: inserted,
    hit, or copied there."""
    inserted: dict[tuple[int, ...], set[str]] = field(default_factory=dict)
    """The model: for each prefix of whole pages that was ever inserted, what of its last page and
    of the state after it."""

    def __post_init__(self):
        self.cache = HiMambaRadixCache(
            self.controller, checkpoint_grid=self.grid, write_policy=self.policy
        )
        self.tree, self.ownership = self.cache._tree, self.cache._ownership
        self.locks, self.write_back = self.cache._locks, self.cache._write_back
        self.kv_slots, self.state_slots = self.controller.kv_slots, self.controller.state_slots
        self.device = self.controller.device_memory

    def state_value(self, tokens):
        return value(f"{self.label}state", tokens)

    # -- the life of a request

    def start(self, tokens) -> Running | None:
        """Prefill: what is cached is used, the rest computed and inserted. None, and nothing left,
        if there is no room."""
        tokens = tuple(tokens)
        match = self.cache.match(tokens[:-1])
        lock = self.lock(match, tokens)
        found = self._restore(match, lock)
        if found is None and match.needs_load:
            self.cache.unlock(lock)
            match = self.cache.match(tokens[:-1], device_only=True)
            assert not match.needs_load
            lock = self.lock(match, tokens)
            found = self._restore(match, lock)
        if found is None:
            self.cache.unlock(lock)
            return None
        rows, state = found
        self.controller.wait_for_loads(self.cache.start_loading())
        self.check_hit(tokens[: match.length], rows, state)
        request = Running(tokens, rows, match.length, state, lock)
        if not self._compute(request, len(tokens)):
            self.drop(request)
            return None
        self.running.append(request)
        return request

    def load_and_leave(self, tokens) -> None:
        """A request that is given up when its load has begun, and before anything has waited for
        it."""
        match = self.cache.match(tokens)
        lock = self.lock(match, tokens)
        loaded = self.cache.load(lock)
        self.cache.start_loading()
        if loaded and loaded.state_slot is not None:
            self.state_slots.free(torch.tensor([loaded.state_slot]))
        self.cache.unlock(lock)

    def lock(self, match, tokens):
        """Lock a match of `tokens`: a hit."""
        self.note_uses()
        lock = self.cache.lock(match)
        self.note_uses(tuple(tokens[: match.length]))
        return lock

    def extend(self, request, more) -> bool:
        """Decode: more tokens of a running request, which ends here where there is no room for
        them."""
        request.tokens += tuple(more)
        if self._compute(request, len(request.tokens), insert=False):
            return True
        self.running.remove(request)
        self.drop(request)
        return False

    def finish(self, request) -> int:
        """End a request; what can be used again goes to the cache. Returns how many tokens that
        is."""
        self.running.remove(request)
        length = self.cache.committed_length(len(request.tokens))
        states = {}
        if length and request.state is not None:
            self.device[MAMBA][request.state] = self.state_value(request.tokens[:length])
            states, request.state = {length: int(request.state)}, None
        if states or length > request.cached:
            result = self.insert(request.tokens[:length], request.rows[:length], states)
            self.check_rows(request.tokens[:length], result.device_indices)
            request.cached = max(length, request.cached)
        self.drop(request)
        return length

    def insert(self, tokens, rows, states):
        """Insert, and note it in the model."""
        self.note_uses()
        result = self.cache.insert(tokens, rows, states)
        self.note_uses(tuple(tokens[: result.length]))
        for end in range(self.page, len(tokens) + 1, self.page):
            self.inserted.setdefault(tuple(tokens[:end]), set()).update(
                ["kv", "state"] if end in states else ["kv"]
            )
        return result

    def visit(self, tokens) -> None:
        """A request that ends with its prefill."""
        request = self.start(tokens)
        if request:
            self.running.remove(request)
            self.drop(request)

    def drop(self, request) -> None:
        """Give back what a request has of its own."""
        if request.rows.numel() > request.cached:
            self.kv_slots.free(request.rows[request.cached :])
        if request.state is not None:
            self.state_slots.free(request.state)
        self.cache.unlock(request.lock)

    def settle(self) -> None:
        """Let everything that was begun end, prefetches excepted."""
        self.cache.start_loading()
        write_back, locks = self.write_back, self.locks
        eventually(
            lambda: self.cache.poll() or not (write_back.writes or write_back.stores or locks.loads)
        )

    def take_host(self, pages, states) -> None:
        """Let somebody else use so many host pages and states, as far as they are free; what it had
        is free again."""
        for name, slots in self.others.items():
            self.controller.host_slots[name].free(slots)
        self.others = {}
        for name, wanted in ((KV, pages * self.page), (MAMBA, states)):
            if name in self.controller.host_slots:
                count = min(wanted, self.controller.host_slots[name].available_size())
                self.others |= (
                    {name: self.controller.host_slots[name].alloc(count)} if count else {}
                )

    def host_is_free(self) -> bool:
        """Whether nobody has a host slot."""
        pools = (
            (self.controller.host_slots[name], self.controller.host[name])
            for name in (KV, MAMBA)[: 1 + bool(self.grid)]
        )
        return all(slots.available_size() == pool.size for slots, pool in pools)

    def fetchable(self, tokens) -> list[int]:
        """Ends in pages of what a prefetch may restore of `tokens` when nothing of it is cached: it
        fits, and can be gone on from."""
        free = {name: slots.available_size() for name, slots in self.controller.host_slots.items()}
        return [
            end
            for end in self.controller.restorable(page_hashes(tokens, self.page))
            if end * self.page <= free[KV] and free.get(MAMBA, 1)
        ]

    def note_uses(self, used=None) -> None:
        """Keep the book of states: which are new, and that the one after a prefix was used."""
        self.clock += 1
        now = {}
        for tier in self.ownership.tiers:
            for node in tier[SlotKind.STATE]:
                key, held = (
                    (tier[SlotKind.STATE].tier, self.prefix(node)),
                    tier[SlotKind.STATE].of(node).indices,
                )
                before, time = self.used.get(key, (None, 0))
                now[key] = held, time if held is before and key[1] != used else self.clock
        self.used = now

    def _restore(self, match, lock):
        """The rows of the match and a state of the request's own; None if there is no room."""
        if match.needs_load:
            loaded = self.cache.load(lock)
            if loaded is None:
                return None
            rows, slot = loaded.device_indices, loaded.state_slot
            if slot is not None:
                return rows, torch.tensor([slot])
        else:
            rows = match.device_indices
        if self.grid is None:
            return rows, None
        state = self.cache.alloc_state()
        if state is None:
            return None
        if match.length:
            self.device[MAMBA][state] = int(self.device[MAMBA][match.state_slot])
            if self.releases_states:
                self.cache.release_state(lock)
        return rows, state

    def _compute(self, request, length, *, insert=True) -> bool:
        need = -(-length // self.page) * self.page - request.rows.numel()
        if need > 0:
            new = self.cache.alloc_kv(need)
            if new is None:
                return False
            request.rows = torch.cat([request.rows, new])
        mine = slice(request.cached, length)
        self.device[KV][request.rows[mine]] = kv_values(
            request.tokens[:length], request.cached, self.label
        )
        if request.state is not None:
            self.device[MAMBA][request.state] = self.state_value(request.tokens[:length])
        if insert:
            self._insert(request, length)
        return True

    def _insert(self, request, length) -> None:
        states = self._checkpoint(request, length)
        result = self.insert(request.tokens[:length], request.rows, states)
        request.rows = torch.cat([result.device_indices, request.rows[result.length :]])
        request.cached = max(request.cached, result.length)
        lock = self.cache.lock(result)
        self.cache.unlock(request.lock)
        request.lock = lock
        self.check_rows(request.tokens[: result.length], result.device_indices)

    def _checkpoint(self, request, length):
        if self.grid is None:
            return {}
        end = length // self.grid * self.grid
        slot = self.cache.alloc_state() if end > 0 else None
        if slot is None:
            return {}
        self.device[MAMBA][slot] = self.state_value(request.tokens[:end])
        return {end: int(slot)}

    # -- checks

    def check_hit(self, tokens, rows, state):
        self.check_rows(tokens, rows)
        if state is not None and tokens:
            assert int(self.device[MAMBA][state]) == self.state_value(tokens)

    def check_rows(self, tokens, rows):
        assert torch.equal(self.device[KV][rows], kv_values(tokens, label=self.label))

    def check(self):
        """What is true between any two calls."""
        self.check_tree()
        self.check_lists()
        self.check_locks()
        self.check_slots()
        self.check_bytes()

    def prefix(self, node):
        return tuple(token for each in reversed(list(node.upward())) for token in each.tokens)

    @property
    def tiers(self):
        """Each tier with its memory."""
        memories = (self.device, self.controller.host_memory)
        return list(zip(self.ownership.tiers, memories, strict=True))

    def check_tree(self):
        for node in self.tree:
            assert node.tokens
            assert len(node.tokens) % self.page == 0
            assert node.parent.children[node.tokens[: self.page]] is node
            assert node.start == node.parent.end
            assert self.tree.node(node.id) is node
            for tier in self.ownership.tiers:
                kv, above = tier[SlotKind.KV], node.parent
                if kv.holds(node):
                    assert above.parent is None or kv.holds(above)
                    assert kv.of(node).indices.numel() == len(node.tokens)
                else:
                    assert not tier[SlotKind.STATE].holds(node)
            assert any(tier[SlotKind.KV].holds(node) for tier in self.ownership.tiers)

    def check_lists(self):
        for tier in self.ownership.tiers:
            for lru in tier.values():
                order = {node: place for place, node in enumerate(lru)}
                holders = [node for node in self.tree if lru.holds(node)]
                assert set(order) == {
                    node for node in holders if lru.kind is SlotKind.STATE or not lru.of(node).locks
                }
                assert lru.slots == sum(lru.of(node).indices.numel() for node in holders)
                locked = [node for node in holders if lru.of(node).locks]
                assert lru.evictable_slots == lru.slots - sum(
                    lru.of(node).indices.numel() for node in locked
                )
                if lru.kind is SlotKind.KV:
                    for node, place in order.items():
                        assert all(order.get(child, -1) < place for child in node.children.values())

    def check_order(self):
        """States stand in the order in which they were last used."""
        self.note_uses()
        for states in (tier[SlotKind.STATE] for tier in self.ownership.tiers):
            times = [self.used[states.tier, self.prefix(node)][1] for node in states]
            assert times == sorted(times), (
                "a state that was used is evicted before one that was not"
            )

    def check_locks(self):
        expected = Counter()
        held = [
            *(lock.slots for lock in self.locks.held),
            *self.locks.loads.values(),
            *(
                copy.locks
                for copies in (self.write_back.writes, self.write_back.stores)
                for copy in copies.values()
            ),
            *(copy.locks for copy in self.write_back.copied),
            *(prefetch.kept for prefetch in self.cache._prefetches.values()),
        ]
        for locks in filter(None, self.locks.loads.values()):
            kept = {lru.tier for lru in locks.nodes if lru.kind is SlotKind.KV}
            assert kept == {"device", "host"}, "a load may lose what it reads or writes"
        for locks in filter(None, held):
            for lru, node in locks.nodes.items():
                used = node.upward() if lru.kind is SlotKind.KV else [node]
                expected.update((lru, each) for each in used)
        for tier in self.ownership.tiers:
            for lru in tier.values():
                for node in self.tree:
                    assert lru.of(node).locks == expected[lru, node]

    def check_slots(self):
        """Every slot is free or has one owner."""
        owned = {(tier, kind): Counter() for tier in ("device", "host") for kind in SlotKind}
        for tier in self.ownership.tiers:
            for lru in tier.values():
                for node in filter(lru.holds, self.tree):
                    owned[lru.tier, lru.kind].update(lru.of(node).indices.tolist())
        for name, slots in (*self.controller.prefetched_slots(), *self.others.items()):
            kind = SlotKind.KV if name == KV else SlotKind.STATE
            owned["host", kind].update(slots.tolist())
        for request in self.running:
            owned["device", SlotKind.KV].update(request.rows[request.cached :].tolist())
            if request.state is not None:
                owned["device", SlotKind.STATE].update(request.state.tolist())
        pools = {SlotKind.KV: (KV, self.kv_slots), SlotKind.STATE: (MAMBA, self.state_slots)}
        for kind, (name, pool) in pools.items():
            if pool is not None:
                self._check_pool(pool, owned["device", kind])
                parked = self.controller.host_slots[name]._parked
                self._check_pool(self.controller.host[name], owned["host", kind], parked)

    def _check_pool(self, pool, owned, parked=None):
        def slots_of(pages):
            return pages.repeat_interleave(pool.page_size).nonzero().view(-1).tolist()

        owned = owned + Counter([] if parked is None else slots_of(parked))
        assert all(count == 1 for count in owned.values()), "a slot has two owners"
        used = slots_of(getattr(pool, "_slots", pool)._in_use)
        assert sorted(owned) == used, "a slot is lost, or owned and free"

    def check_bytes(self):
        arriving = self.controller.arriving()
        for node in self.tree:
            tokens = self.prefix(node)
            assert "kv" in self.inserted[tokens]
            for tier, memory in self.tiers:
                rows, state = (tier[kind].of(node).indices for kind in SlotKind)
                on_device = tier is self.ownership.device
                assert state is None or not on_device or "state" in self.inserted[tokens]
                if not on_device and node.writing:
                    continue
                if rows is not None and not (on_device and arriving & set(rows.tolist())):
                    wanted = kv_values(tokens, node.start, self.label)
                    assert torch.equal(memory[KV][rows], wanted)
                if state is not None:
                    assert int(memory[MAMBA][state]) == self.state_value(tokens)

    def best(self, tokens, *, device_only=False) -> int:
        """The longest prefix that can be used, by looking at every node."""
        tiers = self.ownership.tiers[: 1 if device_only else 2]
        usable = [0]
        for node in self.tree:
            prefix = self.prefix(node)
            # With states only the end of a node can be gone on from.
            ends = range(len(prefix), node.start, -self.page if self.grid is None else -len(prefix))
            known = next((end for end in ends if tuple(tokens[:end]) == prefix[:end]), 0)
            kinds = (SlotKind.KV,) if self.grid is None else SlotKind
            if all(any(tier[kind].holds(node) for tier in tiers) for kind in kinds):
                usable.append(known)
        return max(usable)
