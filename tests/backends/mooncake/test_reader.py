"""Results of reads by the library's codes: arrived, missing, damaged, failed, given up."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager, nullcontext

import pytest

from hicache_backends.mooncake import reader, stores
from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_BYTES
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.reader import PageReader
from hicache_backends.mooncake.stores import Stores
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import Call, Namespace, ObjectRead
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import (
    CancellationToken,
    PageGeometry,
    PoolName,
    StorageTimeoutError,
    StorageUnavailableError,
)
from tests.backends.file.harness import identity
from tests.support.waiting import eventually

LENGTH = 100 + 64
SPACE = Namespace(
    identity(), PoolName("kv"), PageGeometry("page_first", "bfloat16", 4, 16, (60, 40))
)


class Scripted:
    """Stands for a connection: answers codes, in the order in which it is asked, and lengths where
    it is asked for one."""

    def __init__(self, codes, lengths=(), found=None, places=lambda name: "store"):
        self.codes, self.lengths, self.found, self.operations = list(codes), list(lengths), found, 0
        self.by_name, self.by_lookup, self.lookups, self.tried = [], [], [], []
        self.where, self.stores = places, Stores()

    def read(self, names, addresses, sizes):
        self.by_name.append(list(names))
        return [self.codes.pop(0) for _ in names]

    @contextmanager
    def looked_up(self, names):
        self.lookups.append(list(names))
        yield [0] * len(names) if self.found is None else self.found

    def kept(self, names):
        return nullcontext()

    def places(self, names):
        return {name: self.where(name) for name in names}

    def can_read(self, name):
        self.tried.append(name)
        return True

    def read_ranges(self, names, addresses, sizes):
        self.by_lookup.append(list(names))
        return [self.codes.pop(0) for _ in names]

    def size(self, name):
        self.operations += 1
        length = self.lengths.pop(0)
        if isinstance(length, Exception):
            raise length
        return length


def reads(count):
    return [
        ObjectRead(SPACE, f"key {number}", [memoryview(bytearray(60)), memoryview(bytearray(40))])
        for number in range(count)
    ]


def buffered(size, thread_pool):
    return PageReader(Buffers(size), thread_pool, nullcontext())


def direct(thread_pool):
    return PageReader(Buffers(BLOCK_BYTES), thread_pool, nullcontext(), direct=True)


@pytest.fixture(params=["direct", "buffered"])
def ways(request, alone):
    return direct(alone) if request.param == "direct" else buffered(1 << 16, alone)


def test_answers(ways):
    """A miss, an object of another length, and failed transfers, of which the length tells damage
    from faults."""
    some = reads(7)
    codes = [
        LENGTH,
        library.NOT_FOUND,
        50,
        library.TRANSFER_FAILED,
        library.TRANSFER_FAILED,
        library.INVALID_PARAMS,
        -1,
        # Of a second lookup.
        library.INVALID_PARAMS,
    ]
    outcome = ways.read(Scripted(codes, [LENGTH, 50, library.NOT_FOUND], places=str), some, Call())
    assert outcome.arrived == {some[0]}
    # Whether what has arrived is the page is another question.
    assert [read.damaged for read in some[1:]] == [False, True, False, True, False, False]
    assert [str(fault) for fault in outcome.faults] == [
        f"an object cannot be read (code {code})" for code in (-1, library.TRANSFER_FAILED)
    ]


@pytest.mark.parametrize(
    "answer", [library.RPC_TIMED_OUT, StorageUnavailableError("no master")], ids=["code", "error"]
)
def test_a_master_that_goes_while_lengths_are_asked_for(ways, answer):
    """It is asked once more at most: each request may take as long as the master is waited for."""
    connection = Scripted([library.TRANSFER_FAILED] * 5, [50, answer], places=str)
    some = reads(5)
    outcome = ways.read(connection, some, Call())
    assert connection.operations == 2
    assert len(outcome.faults) == 4
    assert [read.damaged for read in some] == [True, False, False, False, False]


def test_what_a_lookup_answers(alone):
    """What is not there is a miss, what it cannot tell a place of in memory is read by its name,
    and a fault is a fault."""
    found = [0, library.NOT_FOUND, library.NO_REPLICA_IN_MEMORY, -1, 0]
    some, connection = reads(5), Scripted([LENGTH] * 3, found=found)
    outcome = buffered(1 << 16, alone).read(connection, some, Call())
    assert outcome.arrived == {some[0], some[2], some[4]}
    assert connection.by_lookup == [names_of([some[0], some[4]])]
    assert connection.by_name == [names_of([some[2]])]
    assert [str(fault) for fault in outcome.faults] == ["an object cannot be read (code -1)"]
    assert not any(read.damaged for read in (some[1], some[3]))


@pytest.mark.parametrize(("size", "objects"), [(2 * LENGTH, 16), (1 << 16, 2)])
def test_chunks(alone, monkeypatch, size, objects):
    """As many objects as a buffer or a chunk holds, or one."""
    monkeypatch.setattr(reader, "CHUNK_OBJECTS", objects)
    some, connection = reads(5), Scripted([LENGTH] * 5)
    assert buffered(size, alone).read(connection, some, Call()).arrived == set(some)
    assert connection.by_lookup == [names_of(some[:2]), names_of(some[2:4]), names_of(some[4:])]
    connection = Scripted([LENGTH] * 5)
    assert buffered(LENGTH, alone).read(connection, some, Call()).arrived == set(some)
    assert connection.by_lookup == [names_of([read]) for read in some]


@pytest.mark.parametrize(("most", "together"), [(LENGTH * 5, [5]), (LENGTH * 2, [2, 2, 1])])
def test_more_than_a_buffer_holds_is_looked_up_together(alone, monkeypatch, most, together):
    """As much as will have come before the leases of the first lookup run out."""
    monkeypatch.setattr(reader, "MAX_LOOKUP_BYTES", most)
    some, connection = reads(5), Scripted([LENGTH] * 5)
    assert buffered(LENGTH, alone).read(connection, some, Call()).arrived == set(some)
    assert [len(names) for names in connection.lookups] == together


ODD = {*names_of(reads(10)[1::2])}


def store_of(name):
    return "odd" if name in ODD else "even"


def test_what_is_asked_of_one_request_lies_on_one_store(alone):
    some, connection = reads(9), Scripted([LENGTH] * 9, places=store_of)
    assert buffered(1 << 16, alone).read(connection, some, Call()).arrived == set(some)
    assert connection.by_lookup == [names_of(some[::2]), names_of(some[1::2])]


def test_what_has_gone_since_its_lookup_is_a_miss(alone):
    """As when the master drops a store; where it does not answer, nothing has gone."""
    some = reads(3)
    gone = names_of(some[1:2])
    connection = Scripted([LENGTH] * 5)
    connection.places = lambda names: {name: "store" for name in names if name not in gone}
    assert buffered(1 << 16, alone).read(connection, some, Call()).arrived == {some[0], some[2]}
    connection.places = lambda names: {}
    assert buffered(1 << 16, alone).read(connection, some, Call()).arrived == set(some)


class Hanging(Scripted):
    """Reads of one store hang until they are let go."""

    def __init__(self, *args):
        super().__init__(*args, places=store_of)
        self.go_on, self.ended = threading.Event(), threading.Event()

    def read_ranges(self, names, addresses, sizes):
        if store_of(names[0]) == "odd":
            self.go_on.wait(60)
            for places in addresses:
                ctypes.memset(places[0], 7, LENGTH)
            self.ended.set()
        return [LENGTH] * len(names)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(stores, "RETRY_SECONDS", 60.0)


@pytest.mark.parametrize("seconds", [None, 4.0], ids=["no deadline", "a short one"])
def test_a_store_that_hangs_takes_no_pages_of_others(monkeypatch, impatient, seconds):
    """What it answers later is not delivered, and meanwhile its pages are misses at once. A call
    that ends before it can know returns in time what has arrived."""
    if seconds:
        monkeypatch.setattr(stores, "PATIENCE_SECONDS", 600.0)
        # Before its deadline, on a busy machine too.
        monkeypatch.setattr(stores, "MAX_MARGIN_SECONDS", seconds)
    thread_pool, connection = ThreadPool("hicache-test", 8, 8), Hanging([])
    way, some = buffered(1 << 16, thread_pool), reads(8)
    call = Call(seconds)
    outcome = way.read(connection, some, call)
    assert outcome.arrived == set(some[::2])
    assert [type(fault) for fault in outcome.faults] == [StorageTimeoutError]
    if not seconds:
        again = way.read(connection, some, Call())
        assert again.arrived == set(some[::2])
        assert again.faults == []
    assert seconds is None or not call.expired()
    before = [bytes(part) for read in some[1::2] for part in read.parts]
    connection.go_on.set()
    eventually(lambda: not thread_pool.hung)
    assert connection.ended.is_set()
    thread_pool.close(60)
    assert [bytes(part) for read in some[1::2] for part in read.parts] == before


def test_a_store_that_is_left_out_is_tried_again_by_one_request(monkeypatch, impatient):
    thread_pool, connection = (
        ThreadPool("hicache-test", 4),
        Scripted([LENGTH] * 50, places=store_of),
    )
    way, some = buffered(1 << 16, thread_pool), reads(4)
    connection.stores.end("odd", connection.stores.begin("odd", 0), failed=True)
    assert connection.stores.any_out()
    assert way.read(connection, some, Call()).arrived == set(some[::2])
    assert connection.tried == []
    # The pause has passed.
    monkeypatch.setattr(stores, "RETRY_SECONDS", 0.0)
    connection.stores.end("odd", connection.stores.begin("odd", 0), failed=True)
    held = threading.Event()
    connection.can_read = lambda name: (connection.tried.append(name), held.wait(60))[1]
    for _ in range(3):
        assert way.read(connection, some, Call()).arrived == set(some[::2])
    held.set()
    thread_pool.close(60)
    assert connection.tried == names_of(some[1:2])
    assert not connection.stores.is_out("odd")


@pytest.mark.parametrize("code", sorted(library.LOOK_UP_AGAIN))
def test_what_has_outlived_its_lookup_is_looked_up_once_more(alone, code):
    some, connection = reads(3), Scripted([LENGTH, code, LENGTH, LENGTH], places=str)
    assert buffered(1 << 16, alone).read(connection, some, Call()).arrived == set(some)
    assert connection.lookups == [names_of(some), names_of(some[1:2])]


def test_threads_share_what_is_left(monkeypatch):
    """Each has memory of its own, and what all have read is answered."""
    monkeypatch.setattr(reader, "CHUNK_OBJECTS", 1)
    threads = 4
    together, places = threading.Barrier(threads), set()

    class Both(Scripted):
        def read_ranges(self, names, addresses, sizes):
            places.add(addresses[0][0])
            together.wait(60)
            return [LENGTH]

    thread_pool, some = ThreadPool("hicache-test", threads), reads(3 * threads)
    assert buffered(1 << 16, thread_pool).read(Both([]), some, Call()).arrived == set(some)
    assert len(places) == threads
    thread_pool.close(60)


class Addresses(Scripted):
    """Remembers where objects were to arrive last."""

    def read(self, names, addresses, sizes):
        self.last = addresses[-1][-1]
        return super().read(names, addresses, sizes)

    read_ranges = read


@pytest.mark.parametrize(
    ("by_name", "code", "after", "again"),
    [
        (True, -800, 0.0, False),
        (True, -800, 60.0, True),
        (True, -704, 0.0, True),
        (False, -800, 0.0, True),
    ],
)
def test_memory_of_a_transfer_that_was_given_up_is_not_used_again(
    monkeypatch, alone, by_name, code, after, again
):
    """Only what the library gives up goes on, and only of a read by name; what fails before that
    has ended."""
    monkeypatch.setattr(library, "ABANDON_SECONDS", after)
    found = [library.NO_REPLICA_IN_MEMORY] if by_name else None
    for each in (*([direct(alone)] if by_name else []), buffered(1 << 16, alone)):
        places = []
        for answer in (code, LENGTH):
            connection = Addresses([answer], [LENGTH], found=found)
            each.read(connection, reads(1), Call())
            places.append(connection.last)
        assert (places[0] == places[1]) is again


@pytest.mark.parametrize(
    ("step", "requests", "faults"),
    [("places", 0, [StorageTimeoutError]), ("read_ranges", 1, [])],
)
def test_nothing_is_delivered_to_a_call_that_is_cancelled(alone, step, requests, faults):
    """Before its request, and while that is under way."""
    token, connection = CancellationToken(), Scripted([LENGTH])
    real, call = getattr(connection, step), Call(cancellation=token)
    setattr(connection, step, lambda *asked: (token.cancel(), real(*asked))[1])
    parts = [memoryview(bytearray(60)), memoryview(bytearray(40))]
    some = [ObjectRead(SPACE, "key", parts, call=call)]
    outcome = buffered(1 << 16, alone).read(connection, some, call)
    assert (len(connection.by_lookup), outcome.arrived) == (requests, set())
    assert [type(fault) for fault in outcome.faults] == faults


def test_misses_take_no_memory(alone):
    made, some = list[memoryview](), reads(3)
    way = PageReader(Buffers(LENGTH, on_new=made.append), alone, nullcontext())
    assert way.read(Scripted([], found=[library.NOT_FOUND] * 3), some, Call()).arrived == set()
    assert made == []
