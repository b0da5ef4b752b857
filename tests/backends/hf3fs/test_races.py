"""The races of the driver that this one replaces, D2 to D6: each forced, and unforced for
`race_seconds`. No wrong byte is a hit."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest

from hicache_backends.hf3fs.slots import engine as engine_module
from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.options import AdminClient
from hicache_storage.objects import Call
from tests.backends.hf3fs.harness import Rig, chain, content, interrupted, recycle
from tests.support.waiting import eventually, repeated

pytestmark = [pytest.mark.slow(seconds=93), pytest.mark.long]

SMALL = "64KiB"
SLOTS = 14
"""Slots of 4608 bytes in so small a file."""
PATIENCE_SECONDS = 30.0


@pytest.fixture
def shared(rig, server):
    """Storages on one small store with a server."""
    return lambda **options: rig(
        **{
            "metadata_url": server.url,
            "file_size": SMALL,
            **options,
        }
    )


def check(server, rig):
    """Every slot is in one state, and all is in order; the scope's numbers."""
    remote = AdminClient(server.url)
    assert remote.call("/v2/fsck", p.Fsck(), p.FsckReport).problems == []
    [status] = [
        part
        for part in remote.call("/v2/scopes", None, p.Scopes).scopes
        if part.scope == rig.file.scope
    ]
    assert status.free + status.leased + status.live + status.quarantined == status.slots
    return status


# D2: a reader is told of slots that are somebody else's when it comes to read them.


def test_d2_slots_are_recycled_in_the_middle_of_a_page(rig):
    """The first half of a page is read, the second is another page's by then."""
    options = {
        "components": (300_000, 600_000),
        "pages": 8,
        "file_size": "4MiB",
    }
    reader, writer, keys = rig(**options), rig(**options), chain("a", 2)
    assert all(writer.put(keys))
    with interrupted(
        engine_module, "read_into", lambda: recycle(writer, keys[:1]), after=1
    ) as calls:
        assert reader.get(keys[:1]) == [None]
    assert len(calls) > 1
    assert reader.storage.get_stats().pools["kv"].pages_damaged == 0


def test_d2_unforced(shared, race_seconds):
    """A writer recycles a small store as fast as it can, and a reader asks for what was just
    there."""
    writer, reader = (
        shared(components=(65_536,), file_size="1MiB"),
        shared(components=(65_536,), file_size="1MiB"),
    )
    written, numbers, chance, seen = list[str](), count(), random.Random(1), Counter[str]()

    def write():
        keys = chain(f"w{next(numbers)}", 4)
        written.extend(key for key, ok in zip(keys, writer.put(keys), strict=True) if ok)

    until = time.monotonic() + race_seconds
    with repeated(write):
        while time.monotonic() < until or not seen["hit"]:
            assert time.monotonic() < until + PATIENCE_SECONDS
            keys = written[-16:]
            chance.shuffle(keys)
            for key, page in zip(keys, reader.get(keys), strict=True):
                right = page == content(key, 0, reader.page_bytes)
                seen["miss" if page is None else "hit" if right else "wrong"] += 1
    assert not seen["wrong"]
    assert seen["hit"]
    assert writer.storage.get_stats().pools["kv"].pages_evicted
    assert not reader.storage.get_stats().pools["kv"].pages_damaged


# D3: the server is killed between what it has acknowledged and what it has saved.


def test_d3_a_restarted_server_names_nobody_elses_slots(shared, server):
    one, old, new = shared(), chain("old", 8), chain("new", SLOTS)
    assert all(one.put(old))
    server.kill()
    server.start()
    one.expect(old)
    # Every slot is written anew, and the server killed the moment that is acknowledged.
    eventually(lambda: all(one.put(new)))
    server.kill()
    server.start()
    assert one.get(old) == [None] * 8
    one.expect(new)
    shared().expect(new)
    assert check(server, one).live == SLOTS


def test_d3_a_server_set_back_to_an_older_state_is_found_out(shared, server, tmp_path):
    """What its file says of slots is old, and other pages are in them: misses, not one wrong
    byte."""
    home, one, old, new = server.tmp, shared(), chain("old", 8), chain("new", SLOTS)
    assert all(one.put(old))
    server.kill()
    saved = {path.name: shutil.copy2(path, tmp_path / path.name) for path in home.iterdir()}
    server.start()
    eventually(lambda: all(one.put(new)))
    server.kill()
    for path in home.iterdir():
        path.unlink()
    for name, path in saved.items():
        shutil.copy2(path, home / name)
    server.start()
    assert one.get(old) == [None] * 8
    # Until leases have ended that the copy may not know.
    eventually(lambda: all(one.put(old)))
    one.expect(old)
    check(server, one)


def test_d3_unforced(shared, server, race_seconds):
    """Killed again and again while every slot is recycled: no key leads to another's slot, nothing
    acknowledged last is lost."""
    one, other, chance = shared(lease_seconds=1.0), shared(lease_seconds=1.0), random.Random(2)
    written, until, kills = dict[str, None](), time.monotonic() + max(4.0, race_seconds), 0

    def read():
        keys = list(written)[-2 * SLOTS :]
        for key, page in zip(keys, other.get(keys, seconds=1.0), strict=True):
            assert page in (None, content(key, 0, other.page_bytes)), f"wrong bytes for {key}"

    with repeated(read):
        while time.monotonic() < until or kills < 2:
            last = list[str]()
            for _ in range(chance.randint(1, 20)):
                keys = chain(f"{os.urandom(4).hex()}", chance.randint(1, 6))
                last = [key for key, ok in zip(keys, one.put(keys, seconds=2.0), strict=True) if ok]
                written.update(dict.fromkeys(last))
            server.kill()
            server.start()
            kills += 1
            one.expect(last)
    check(server, one)


# D4: more is asked for than there is.


def test_d4_a_batch_beyond_capacity_costs_nothing_for_ever(shared):
    one, early = shared(pages=64), chain("early", 4)
    assert all(one.put(early))
    for number in range(3):
        answers = one.put(chain(f"huge-{number}", 60))
        assert sum(answers) <= SLOTS
        assert answers == sorted(answers, reverse=True)
    again = chain("again", 8)
    eventually(lambda: all(one.put(again)))
    one.expect(again)
    assert one.storage.get_stats().faults == 0


def test_d4_all_slots_are_leased_and_none_confirmed(shared, server):
    one, keys = shared(), chain("a", 4)
    assert one.hit(keys) == 0
    asked = p.ReserveScope(scope=one.file.scope, keys=chain("dead", 3 * SLOTS))
    [leases] = one.store.metadata.reserve([asked], Call(5), lease_seconds=4.0).scopes
    assert Counter(leases.states) == {p.Reserved.LEASED: SLOTS, p.Reserved.FULL: 2 * SLOTS}
    # It would be stored if it waited for their end.
    assert one.put(keys, seconds=0.5) == [False] * 4
    eventually(lambda: all(one.put(keys)))
    one.expect(keys)
    check(server, one)


# D5: a writer dies, or is wrong, between reserve and commit.


def test_d5_the_slots_of_a_dead_writer_return(shared, server, tmp_path):
    one, keys = shared(), chain("a", SLOTS)
    assert one.hit(keys) == 0
    context = multiprocessing.get_context("spawn")
    stuck = context.Event()
    child = context.Process(
        target=_stick_before_commit, args=(str(tmp_path / "store"), server.url, keys, stuck)
    )
    child.start()
    assert stuck.wait(PATIENCE_SECONDS * 2)
    assert check(server, one).leased == SLOTS
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert one.get(keys) == [None] * SLOTS
    eventually(lambda: all(one.put(keys)))
    one.expect(keys)
    assert check(server, one).live == SLOTS


def _stick_before_commit(path, url, keys, stuck):
    one = Rig(path, metadata_url=url, file_size=SMALL, lease_seconds=4.0)
    with interrupted(one.store.metadata, "commit", lambda: (stuck.set(), time.sleep(600))):
        one.put(keys)


def test_d5_one_key_takes_one_slot(shared, server):
    """Twice in a batch, and from several writers at once."""
    rigs, keys = [shared() for _ in range(3)], chain("a", 4)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda one: one.put([*keys, *keys]), rigs))
    assert all(rigs[0].put([*keys, *keys]))
    rigs[0].expect(keys)
    status = check(server, rigs[0])
    assert (status.leased, status.live) == (0, 4)


# D6: what is confirmed or released is not one's own any more.


def test_d6_a_commit_after_a_clear_maps_nothing(shared):
    """Meanwhile the slots are other pages' by another writer."""
    # No slot is given to another page before the lease under which it may be written is over.
    one, other, keys, others = shared(lease_seconds=1.0), shared(), chain("a", 8), chain("b", SLOTS)

    def clear():
        other.storage.clear()
        eventually(lambda: all(other.put(others)))

    with interrupted(one.store.metadata, "commit", clear) as calls:
        answers = one.put(keys)
    assert calls
    other.expect(others)
    found = other.get(keys)
    for key, ok, page in zip(keys, answers, found, strict=True):
        assert page in (None, content(key, 0, one.page_bytes))
        assert not ok or page is not None


# All of it at once.


def test_d4_to_d6_unforced(shared, server, race_seconds):
    """Several clients set more than fits, read with holes, delete and clear: every page delivered
    is right, and no slot is lost."""
    seen = Counter[str]()

    def work(one, chance):
        keys = chain(f"c{chance.randrange(8)}", chance.choice((2, 5, 12, 20)))
        chance.shuffle(keys)
        match chance.choices(("set", "get", "delete", "clear"), (8, 12, 2, 0.3))[0]:
            case "set":
                one.put(keys, seconds=1.0)
            case "get":
                for key, page in zip(keys, one.get(keys), strict=True):
                    right = page == content(key, 0, one.page_bytes)
                    seen["miss" if page is None else "hit" if right else "wrong"] += 1
            case "delete":
                one.storage.delete(keys[:3])
            case _:
                one.storage.clear()

    rigs = [shared(wait_seconds=0.05, lease_seconds=1.0) for _ in range(4)]
    until = time.monotonic() + race_seconds
    with repeated(*[partial(work, one, random.Random(at)) for at, one in enumerate(rigs)]):
        while time.monotonic() < until or (
            not (seen["hit"] and seen["miss"]) and time.monotonic() < until + PATIENCE_SECONDS
        ):
            time.sleep(0.1)
    assert not seen["wrong"]
    assert seen["hit"]
    assert seen["miss"]
    assert not any(one.storage.get_stats().pools["kv"].pages_damaged for one in rigs)
    eventually(lambda: not check(server, rigs[0]).leased)
    keys = chain("at the end", SLOTS)
    eventually(lambda: all(rigs[0].put(keys)))
    assert check(server, rigs[0]).live == SLOTS
