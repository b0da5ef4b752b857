"""What an unchanged SGLang asks: the rules of the compatible part."""

from __future__ import annotations

import random
import time

import pytest

from tests.metadata_server.protocol.peer import QUARANTINE, keys_of

CALLS = {
    "exists": {"keys": ["a"]},
    "get_page_indices": {"keys": ["a"]},
    "reserve_and_allocate_page_indices": {"keys": [["a", ""]]},
    "confirm_write": {"written_keys_to_confirm": [["a", 0]], "pages_to_release": []},
    "delete_keys": {"keys": ["a"]},
    "clear": {},
}
STEM = "0123456789abcdef"
OPAQUE = [
    *(STEM, STEM.upper(), f"{STEM} ", f" {STEM}", f"{STEM}/", f"../{STEM}", f"0{STEM}"),
    *(f"{STEM}%2e", f"{STEM}%2E", f"{STEM}?a=b#c", f"{STEM},", f"{STEM}'--", f'{STEM}"'),
    *(f"{STEM}\0", f"{STEM}\0x", f"{STEM}\n", f"{STEM}\t", f"{STEM}-k", f"{STEM}-v", f"{STEM}:kv"),
    # The same letter as one code point and as two: a server that normalizes makes them one key.
    *(f"{STEM}\u00e9", f"{STEM}e\u0301", f"{STEM}ß", f"{STEM}ss", f"{STEM}一", f"{STEM}😀"),
    *("x" * 255, "x" * 256, "x" * 511, "x" * 512, "x" * 511 + "y"),
]


async def unmapped(peer, keys):
    return not any(await peer.exists(keys)) and await peer.indices(keys) == [None] * len(keys)


# Scopes.


async def test_a_new_scope_has_all_its_slots_and_again_changes_nothing(peer):
    """MD-INIT-1 and MD-CONF-1."""
    await peer.make(7)
    keys = keys_of(7)
    slots = await peer.reserved(keys)
    assert sorted(slots) == list(range(7))
    for _ in range(2):
        await peer.confirm(keys, slots)
    # A newer SGLang may send more.
    await peer.sglang("initialize", 204, num_pages=7, unheard_of=True)
    assert await peer.indices(keys) == slots


async def test_another_size_is_refused(peer):
    """MD-INIT-2."""
    await peer.make(16)
    slots = await peer.put(keys_of(5))
    for size in (17, 15, 160, 1):
        assert (await peer.sglang("initialize", 409, num_pages=size))["field"] == "num_pages"
    assert await peer.indices(keys_of(5)) == slots


async def test_scopes_do_not_show_in_each_other(peer):
    """MD-SCOPE-1."""
    await peer.make(8)
    keys = keys_of(4)
    slots = await peer.put(keys)
    for other in ("1:kv", "0:kv-mamba", "10:kv", "12:kv-1f.A_0"):
        apart = peer.of(other)
        await apart.make(8)
        assert not any(await apart.exists(keys))
        await apart.put(keys)
        await apart.sglang("delete_keys", 204, keys=keys[:2])
        await apart.sglang("clear", 204)
        assert await peer.indices(keys) == slots, other


async def test_an_unknown_scope_is_not_found_nor_made(peer):
    """MD-SCOPE-2; MD-INIT-3: nor by a bad size."""
    for size in (-1, 0, "16", 1.5, None, [16], True):
        assert (await peer.sglang("initialize", 422, num_pages=size))["field"] == "num_pages"
    for operation, body in [*CALLS.items(), *CALLS.items()]:
        await peer.sglang(operation, 404, **body)


# Keys that are found.


async def test_answers_are_aligned_with_keys(peer):
    """MD-FIND-1: through holes and duplicates, in any order; MD-BIG-1: large batches are whole or
    refused."""
    await peer.make(160)
    stored, missing, chance = keys_of(128), keys_of(4000, "m"), random.Random(1)
    where = dict(zip(stored, await peer.put(stored), strict=True))
    for count in (4096, 128, 30, 17, 2, 1):
        asked = chance.choices([*stored, *missing[:count]], k=count)
        assert await peer.exists(asked) == [key in where for key in asked]
        assert await peer.indices(asked) == [where.get(key) for key in asked]
    assert [await peer.exists([]), await peer.indices([]), await peer.reserve([])] == [[], [], []]
    await peer.confirm()
    assert (await peer.sglang("exists", 413, keys=keys_of(20_000)))["field"] == "keys"


async def test_keys_are_opaque(peer):
    """MD-FIND-2."""
    await peer.make(2 * len(OPAQUE))
    slots = await peer.put(OPAQUE)
    assert len(set(slots)) == len(OPAQUE)
    assert await peer.indices(OPAQUE) == slots
    await peer.sglang("delete_keys", 204, keys=OPAQUE[::3])
    assert await peer.exists(OPAQUE) == [bool(i % 3) for i in range(len(OPAQUE))]


# Reservations.


async def test_slots_of_old_keys_and_of_new_ones(peer):
    """MD-RES-1, and MD-RES-2: as many keys get slots as there are, and the slots serve."""
    await peer.make(15)
    stored, new, more = keys_of(5), keys_of(5, "n"), keys_of(9, "m")
    slots = await peer.put(stored)
    answer = await peer.reserve([key for pair in zip(new, stored, strict=True) for key in pair])
    assert answer[1::2] == [(True, slot) for slot in slots]
    taken = [*slots, *(slot for there, slot in answer[::2] if not there)]
    answer = await peer.reserve(more)
    given = {key: slot for key, (_, slot) in zip(more, answer, strict=True) if slot >= 0}
    assert sorted([*given.values(), *taken]) == list(range(15))
    assert answer.count((False, -1)) == 4
    await peer.confirm(given, given.values())
    assert await peer.indices(more) == [given.get(key) for key in more]


# Confirms and releases.


async def test_a_slot_that_was_never_reserved(peer):
    """MD-CONF-2: the right pair among the wrong ones is done."""
    await peer.make(16)
    [right] = await peer.reserved(["right"])
    free = [slot for slot in range(16) if slot != right][:3]
    answer = await peer.confirm(["a", "right", "b", "c"], [free[0], right, *free[1:]], status=409)
    assert answer["field"] == "written_keys_to_confirm[0]"
    assert await unmapped(peer, ["a", "b", "c"])
    assert await peer.indices(["right"]) == [right]


async def test_a_slot_outside_the_file(peer):
    """MD-CONF-3."""
    await peer.make(8)
    for slot in (8, 9, -1, -8, 10**9, 2**63):
        refused = await peer.confirm(["a"], [slot], status=422)
        assert refused["field"].startswith("written_keys_to_confirm[0]")
        assert (await peer.confirm(released=[slot], status=422))["field"] == "pages_to_release[0]"
        assert await unmapped(peer, ["a"])
    answer = await peer.reserve(["a", *keys_of(11)])
    assert {slot for _, slot in answer} == {-1, *range(8)}


# Pages that go.


@pytest.mark.long
async def test_freeing_costs_the_same_however_many_are_free(timed):
    """MD-BIG-2: a search of the free list takes a hundred times as long once it is full."""
    batch = 2000
    await timed.make(15 * batch)
    slots = [await timed.reserved(keys_of(batch, f"{number}-")) for number in range(15)]
    seconds = []
    for given in slots:
        begin = time.perf_counter()
        await timed.confirm(released=given)
        timed.wait(QUARANTINE)
        await timed.sglang("exists", keys=[])
        seconds.append(time.perf_counter() - begin)
    # The third slowest: a machine that is busy elsewhere slows one or two.
    assert sorted(seconds)[-3] < 6 * min(seconds[:2]) + 0.15
