"""Clients of both parts on one scope, in random order: no slot belongs to two keys, and none is lost
(MD-SLOT-1, MD-SLOT-2); both parts see one state (MD-API-4). A key has one reservation and is not there
before it is confirmed (MD-RES-4, MD-RES-5). Reservations end by themselves (MD-RES-3, MD-RES-6), and a
lease that has ended is stale (MD-LEASE-2). A confirm of a slot that is not reserved for its key, or not
any more, changes nothing (MD-CONF-2), nor does a release of a live slot or a second one (MD-CONF-4). What
is deleted or cleared is gone (MD-DEL-1, MD-DEL-2).

`test_histories.py` has the scope alone, and restarts it.
"""

from __future__ import annotations

import random

import pytest

from tests.metadata_server.protocol.peer import LEASE, QUARANTINE, keys_of


class Clients:
    """What clients were told, and the checks of each answer."""

    def __init__(self, peer, slots, keys, chance):
        self.peer, self.slots, self.keys, self.chance = peer, slots, keys_of(keys), chance
        self.stored = {}
        """Slots of keys that were written and not deleted; the server may have evicted them."""
        self.lengths = {}
        """Of the page that a key had last: the old part stores none."""
        self.held = {}
        """By slot the key for which it is reserved, the end, and the lease (0 of the old part)."""
        self.ended = []
        """Key, slot and lease of reservations that ended without a page."""

    async def step(self):
        chance, now = self.chance, self.peer.clock.now
        steps = ("reserve",) * 4 + ("confirm",) * 3
        steps += ("renew", "end", "late", "wrong", "release", "delete", "wait")
        match chance.choice(steps):
            case "reserve":
                await self.reserve(chance.choices(self.keys, k=chance.randint(1, 5)))
            case "confirm" if self.held:
                slot, (key, end, lease) = self.taken()
                if await self.confirmed(key, slot, lease, end > now):
                    self.stored[key] = slot
                    self.lengths[key] = int(lease > 0)
            case "renew" if self.held:
                slot, (key, end, lease) = self.taken()
                renews = lease > 0
                if renews:
                    assert await self.peer.renew([lease], LEASE) == [end > now]
                if end > now:
                    self.held[slot] = key, now + LEASE if renews else end, lease
            case "end" if self.held:
                slot, (key, end, lease) = self.taken()
                self.ended.append((key, slot, lease))
                if lease:
                    assert await self.peer.abort([lease]) == [end > now]
                elif end > now:
                    await self.peer.confirm(released=[slot])
            case "late" if self.ended:
                key, slot, lease = chance.choice(self.ended)
                # The old part has no name for a reservation but its key and slot.
                if lease or self.held.get(slot, ("",))[0] != key:
                    await self.confirmed(
                        key, slot, lease, not lease and self.stored.get(key) == slot
                    )
                if lease:
                    for stale in (lease, lease + 10**9):
                        assert await self.peer.renew([stale], LEASE) == [False]
                        assert await self.peer.abort([stale]) == [False]
            case "wrong":
                key, slot = chance.choice(self.keys), chance.choice(self.some_slots())
                if self.held.get(slot, ("",))[0] != key and self.stored.get(key) != slot:
                    await self.confirmed(key, slot, 0, expected=False)
            case "release":
                # Slots that are free, quarantined or live, one of them twice.
                live = set(await self.peer.indices(self.keys))
                some = [slot for slot in self.some_slots() if slot not in self.held]
                refused = bool(live & set(some))
                await self.peer.confirm(released=some + some[:1], status=409 if refused else 204)
            case "delete" if chance.random() < 0.1:
                await self.peer.sglang("clear", 204)
                self.stored = {}
                self.ended += [(key, slot, lease) for slot, (key, _, lease) in self.held.items()]
                self.held = {}
            case "delete":
                gone = chance.choices([*self.keys, "unknown"], k=3)
                await self.peer.sglang("delete_keys", 204, keys=gone)
                for key in gone:
                    self.stored.pop(key, None)
            case "wait":
                self.peer.wait(chance.choice((0.5, QUARANTINE, LEASE / 3)))
            case _:
                pass
        await self.check()

    def some_slots(self):
        """Slots that were given out, mostly."""
        return self.chance.sample(range(min(self.slots, 40)), 3)

    def taken(self):
        slot = self.chance.choice(list(self.held))
        return slot, self.held.pop(slot)

    async def reserve(self, keys):
        now = self.peer.clock.now
        for slot in [slot for slot, (_, end, _) in self.held.items() if end <= now]:
            key, _, lease = self.held.pop(slot)
            self.ended.append((key, slot, lease))
        if self.chance.random() < 0.5:
            answer = await self.peer.reserve(keys)
            there = {key: slot for key, (there, slot) in zip(keys, answer, strict=True) if there}
            assert there.items() <= self.stored.items()
            given = [(-1 if there else slot, 0) for there, slot in answer]
        else:
            leased = await self.peer.lease(keys)
            given = [
                (slot if lease else -1, lease)
                for slot, lease in zip(leased.slots, leased.leases, strict=True)
            ]
        for key, (slot, lease) in zip(keys, given, strict=True):
            if slot >= 0:
                assert slot < self.slots
                assert slot not in self.held, "a slot is given to two"
                assert key not in {key for key, _, _ in self.held.values()}, "a key has two slots"
                self.held[slot] = key, now + LEASE, lease

    async def confirmed(self, key, slot, lease, expected):
        if lease:
            done = await self.peer.commit([lease]) == [True]
        else:
            body = {"written_keys_to_confirm": [(key, slot)]}
            done = (await self.peer.caller.post("/0/confirm_write", body)).status == 204
        assert done == expected
        return done

    async def check(self):
        """Each key is where it was written, or was evicted; no slot is announced twice."""
        found = await self.peer.indices(self.keys)
        assert await self.peer.exists(self.keys) == [slot is not None for slot in found]
        pages = await self.peer.lookup(self.keys)
        assert pages.slots == [-1 if slot is None else slot for slot in found]
        lengths = [
            0 if slot is None else self.lengths[key]
            for key, slot in zip(self.keys, found, strict=True)
        ]
        assert pages.lengths == lengths
        there = [slot for slot in found if slot is not None]
        held = {slot for slot, (_, end, _) in self.held.items() if end > self.peer.clock.now}
        assert len(set(there)) == len(there), "a slot belongs to two keys"
        assert not held & set(there), "a slot is announced that is reserved"
        for key, slot in zip(self.keys, found, strict=True):
            if slot is None:
                gone = self.stored.pop(key, None)
                assert gone is None or self.slots < len(self.keys), "nobody wanted room"
            assert self.stored.get(key) == slot, "a key is where nobody wrote it"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slots", "keys"), [(6, 14), (400, 8)], ids=["full", "with room"])
async def test_histories(timed, slots, keys, seed):
    await timed.make(slots)
    clients = Clients(timed, slots, keys, random.Random(seed))
    for _ in range(150):
        await clients.step()
    await timed.sglang("clear", 204)
    timed.wait()
    assert sorted(await timed.reserved(keys_of(slots, "n"))) == list(range(slots))
