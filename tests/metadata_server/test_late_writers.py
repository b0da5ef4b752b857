"""A slot changes hands only when no earlier holder of a lease may still write into it, also after a
restart that lost all; `test_histories.py` has clears. Numbers of leases and generations are never given
twice, whatever of a store survives a restart."""

from __future__ import annotations

import shutil
import time
from contextlib import closing

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.storage.sqlite import open_store
from tests.metadata_server import services
from tests.metadata_server.services import NOW

SLOTS, LEASE, QUARANTINE = 6, 10.0, 5.0
LIMITS = msgspec.structs.replace(
    DEFAULTS, quarantine_seconds=QUARANTINE, lease_seconds=LEASE, max_lease_seconds=20.0
)
DONE, STALE = p.Settled.DONE, p.Settled.STALE


class OneServer:
    """A server with one scope; started again, it loses what its store does not keep."""

    def __init__(self, address):
        self.address, self.limits, self.now = address, LIMITS, NOW
        self.store = open_store(address)
        self.service = services.restored(self.store, self.now, self.limits)

    def start(self):
        """Restart it."""
        self.store.close()
        self.store = open_store(self.address)
        self.service = services.restored(self.store, self.now, self.limits)

    def ask(self, call, *arguments, **options):
        """Make a call of `services`."""
        self.service.settle(self.now, 10**6)
        answer = call(self.service, *arguments, now=self.now, **options)
        self.store.write(self.service.take_changes())
        return answer

    def initialize(self, *earlier):
        earlier = list(earlier)
        return self.ask(services.initialize, "0:kv", slots=SLOTS, earlier_lease_seconds=earlier)

    def reserve(self, keys, seconds=LEASE):
        return self.ask(services.reserve, keys, lease_seconds=seconds)

    def free(self, keys, seconds=LEASE):
        """Slots that some keys get."""
        leased = self.reserve(keys, seconds)
        return {slot for slot, lease in zip(leased.slots, leased.leases, strict=True) if lease}

    def commit(self, leases):
        return self.ask(services.commit, leases)

    def counts(self):
        self.service.settle(self.now, 10**6)
        [status] = self.service.list_scopes().scopes
        return status.free, status.leased, status.live, status.quarantined

    def close(self):
        self.store.close()


@pytest.fixture
def one(tmp_path):
    with closing(OneServer(f"sqlite:///{tmp_path}/m.db")) as made:
        yield made


def test_a_scope_that_is_made_anew_gives_no_slot_before_leases_of_an_earlier_server_are_over(one):
    """MD-QUAR-3."""
    one.initialize(LEASE)
    assert one.counts() == (0, 0, 0, SLOTS)
    answer = one.reserve("a")
    assert (answer.states, answer.slots, answer.evicted) == ([p.Reserved.FULL], [-1], 0)
    status = one.ask(services.slot_status, 3)
    assert (status.state, round(status.seconds_left)) == ("quarantined", LEASE + QUARANTINE)
    one.ask(services.clear)
    # Who comes later cannot open it, nor can it be dropped and made anew.
    assert one.initialize() == [False]
    with pytest.raises(RequestError, match=f"{SLOTS} slots"):
        one.ask(services.drop)
    one.now += LEASE + QUARANTINE - 0.5
    assert not one.free("a")
    one.now += 1
    assert one.counts() == (SLOTS, 0, 0, 0)
    one.ask(services.drop)
    assert one.initialize() == [True]
    assert len(one.free("abcdef")) == SLOTS


def test_a_scope_whose_file_is_new_and_one_that_is_there_are_open(one):
    assert one.initialize(0.0) == [True]
    assert len(one.free("abc")) == 3
    assert one.initialize(LEASE) == [False]
    assert len(one.free("def")) == 3


def test_max_leases_bound_the_wait(one):
    one.initialize(1e9)
    one.now += LIMITS.max_lease_seconds + QUARANTINE + 0.5
    assert one.free("a")


def test_a_copy_in_the_place_of_a_store_gives_no_slot_before_later_leases_are_over(tmp_path):
    file, copy = tmp_path / "m.db", tmp_path / "copy.db"
    with closing(OneServer(f"sqlite:///{file}")) as one:
        one.initialize()
        one.reserve("a")
    shutil.copy(file, copy)
    with closing(OneServer(f"sqlite:///{file}")) as one:
        assert one.free("b")
    # A new file often gets the inode number of the removed one.
    file.unlink()
    shutil.copy(copy, file)
    with closing(OneServer(f"sqlite:///{file}")) as one:
        assert not one.free("c")
        one.now += LIMITS.max_lease_seconds + QUARANTINE - 1
        assert not one.free("c")
        one.now += 2
        assert one.free("c")


def test_a_server_that_serves_for_long_opens_new_scopes_at_once(one):
    """It has given all leases since its start, and those of an earlier server are over."""
    one.now += LEASE + QUARANTINE
    one.initialize(LEASE)
    assert one.free("a")


def test_a_closed_scope_stays_closed_over_a_restart(one):
    one.initialize(LEASE)
    one.ask(services.clear)
    one.now += 3
    one.start()
    assert one.counts() == (0, 0, 0, SLOTS)
    one.now = NOW + LEASE + QUARANTINE + 0.1
    assert one.free("a")


def test_a_scope_that_is_dropped_and_made_anew_goes_on_with_the_numbers(one):
    one.now += 100
    one.initialize()
    before = one.reserve("a")
    part = p.LeaseScope(scope="0:kv", leases=before.leases)
    one.service.abort(p.Abort(scopes=[part]), one.now)
    one.now += QUARANTINE + 0.5
    one.ask(services.drop)
    # A replica whose clock is behind has taken over.
    one.now = NOW
    one.initialize()
    after = one.reserve("a")
    assert after.slots == before.slots
    assert after.leases[0] > before.leases[0]
    assert after.generations[0] > before.generations[0]
    assert one.commit(before.leases) == [STALE]


def test_leases_outlive_a_restart_that_shortens_the_limits(one):
    one.initialize()
    gone = one.free("abc", seconds=20.0)
    one.ask(services.clear)
    held = one.reserve("d", seconds=20.0)
    one.limits = msgspec.structs.replace(
        LIMITS, lease_seconds=2.0, max_lease_seconds=2.0, quarantine_seconds=1.0
    )
    for after in (0, 1, 1, 10):
        one.now += after
        one.start()
    assert one.commit(held.leases) == [DONE]
    one.now = NOW + 19
    others = one.free("uvwxyz")
    assert others
    assert not others & gone


# Numbers.


def lose_nothing(directory, before):
    pass


def lose_all(directory, before):
    for file in directory.iterdir():
        file.unlink()


def go_back(directory, before):
    """As a disk that was set back does: the files are those of before, and not copies."""
    for file in before.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("loss", [lose_nothing, lose_all, go_back])
@pytest.mark.parametrize("store", ["memory:", "sqlite:///{}/m.db"])
def test_an_old_lease_is_stale_for_good(tmp_path, monkeypatch, store, loss):
    """MD-LEASE-6."""
    # A second between two looks at the clock: a restart takes that long.
    seconds = iter(range(10**6))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (NOW + next(seconds))))
    directory, before = tmp_path / "store", tmp_path / "before"
    directory.mkdir()
    leases, generations = set(), {}
    for number in range(3):
        with closing(OneServer(store.format(directory))) as one:
            one.initialize()
            if not before.exists():
                shutil.copytree(directory, before)
            part = one.reserve(["a", f"only-{number}"])
            assert not leases & set(part.leases)
            for slot, generation in zip(part.slots, part.generations, strict=True):
                assert slot < 0 or generation > generations.get(slot, 0)
                generations[slot] = generation
            if loss is lose_nothing and store != "memory:":
                assert one.commit(part.leases[1:]) == [DONE]
            else:
                assert set(one.commit(sorted(leases))) <= {STALE}
                assert set(one.commit(part.leases)) == {DONE}
            leases |= {lease for lease in part.leases if lease}
            # Exact in JSON, too.
            assert all(0 <= number < 2**53 for number in (*part.leases, *part.generations))
        loss(directory, before)


def test_numbers_go_on_where_the_clock_was_set_back(one, monkeypatch):
    one.initialize()
    before = one.reserve("a")
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    one.start()
    assert one.reserve("b").leases > before.leases
