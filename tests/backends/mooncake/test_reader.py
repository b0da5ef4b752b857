"""Results of reads by the library's codes: arrived, missing, damaged, failed, given up."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from hicache_backends.mooncake import buffered, memory
from hicache_backends.mooncake.buffered import BufferedReader
from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, Blocks
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.reader import DirectReader, split_reads
from hicache_storage.objects import Call, Namespace, ObjectRead
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import CancellationToken, PageGeometry, PoolName, StorageUnavailableError
from tests.backends.mooncake.harness import identity

LENGTH = 100 + 64
SPACE = Namespace(
    identity(), PoolName("kv"), PageGeometry("page_first", "bfloat16", 4, 16, (60, 40))
)


class Scripted:
    """Stands for a connection: answers codes, in the order in which it is asked, and lengths where
    it is asked for one."""

    def __init__(self, codes, lengths=(), found=None):
        self.codes, self.lengths, self.found, self.operations = list(codes), list(lengths), found, 0
        self.by_name, self.by_lookup, self.lookups = [], [], []

    def read(self, names, addresses, sizes):
        self.by_name.append(list(names))
        return [self.codes.pop(0) for _ in names]

    @contextmanager
    def looked_up(self, names, call):
        self.lookups.append(list(names))
        yield [0] * len(names) if self.found is None else self.found

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


@pytest.fixture
def alone():
    thread_pool = ThreadPool("hicache-test")
    thread_pool.close(0)
    return thread_pool


@pytest.fixture(params=["wait", "wait, tcp", "bounce_buffer"])
def ways(request, alone):
    if request.param == "bounce_buffer":
        return BufferedReader(1 << 16, alone)
    return DirectReader(
        Blocks(lambda start, size: None), alone if request.param == "wait, tcp" else None
    )


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
    ]
    outcome = ways.read(Scripted(codes, [LENGTH, 50, library.NOT_FOUND]), some, Call())
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
    connection = Scripted([library.TRANSFER_FAILED] * 5, [50, answer])
    some = reads(5)
    outcome = ways.read(connection, some, Call())
    assert connection.operations == 2
    assert len(outcome.faults) == 4
    assert [read.damaged for read in some] == [True, False, False, False, False]


def test_what_a_lookup_answers(alone):
    """What is not there is a miss, what it cannot tell a place of in memory is read by its name,
    and a fault is a fault."""
    found = [0, library.NOT_FOUND, library.NO_REPLICA_IN_MEMORY, -1, 0]
    for way in (
        DirectReader(Blocks(lambda start, size: None), alone),
        BufferedReader(1 << 16, alone),
    ):
        some, connection = reads(5), Scripted([LENGTH] * 3, found=found)
        outcome = way.read(connection, some, Call())
        assert outcome.arrived == {some[0], some[2], some[4]}
        assert [name for names in connection.by_lookup for name in names] == names_of(
            [some[0], some[4]]
        )
        assert connection.by_name == [names_of([some[2]])]
        assert [str(fault) for fault in outcome.faults] == ["an object cannot be read (code -1)"]
        assert not any(read.damaged for read in (some[1], some[3]))


@pytest.mark.parametrize(("limit", "most"), [("CHUNK_BYTES", 2 * LENGTH), ("CHUNK_OBJECTS", 2)])
def test_chunks(alone, monkeypatch, limit, most):
    """As many objects as a chunk holds, or one."""
    monkeypatch.setattr(buffered, limit, most)
    some, connection = reads(5), Scripted([LENGTH] * 5)
    assert BufferedReader(1 << 16, alone).read(connection, some, Call()).arrived == set(some)
    assert connection.by_lookup == [names_of(some[:2]), names_of(some[2:4]), names_of(some[4:])]
    # A buffer that holds one of them, whose half would hold none.
    connection = Scripted([LENGTH] * 5)
    assert BufferedReader(LENGTH, alone).read(connection, some, Call()).arrived == set(some)
    assert connection.by_lookup == [names_of([read]) for read in some]


@pytest.mark.parametrize(("most", "together"), [(LENGTH * 5, [5]), (LENGTH * 2, [2, 2, 1])])
def test_more_than_a_buffer_holds_is_looked_up_together(alone, monkeypatch, most, together):
    """As much as will have come before the leases of the first lookup run out."""
    monkeypatch.setattr(buffered, "MAX_LOOKUP_BYTES", most)
    some, connection = reads(5), Scripted([LENGTH] * 5)
    assert BufferedReader(LENGTH, alone).read(connection, some, Call()).arrived == set(some)
    assert [len(names) for names in connection.lookups] == together


@pytest.mark.parametrize(
    ("code", "after", "left"), [(-800, 0.0, 0), (-800, 60.0, 3), (-704, 0.0, 3)]
)
def test_after_one_that_hangs_no_others_are_waited_for(alone, monkeypatch, code, after, left):
    monkeypatch.setattr(library, "HUNG_FRACTION", after)
    monkeypatch.setattr(buffered, "CHUNK_BYTES", LENGTH)
    for way in (
        DirectReader(Blocks(lambda start, size: None), alone),
        BufferedReader(1 << 16, alone),
    ):
        some, connection = reads(5), Scripted([LENGTH, code, LENGTH, LENGTH, LENGTH], [LENGTH])
        assert way.read(connection, some, Call()).arrived == {some[0], *some[5 - left :]}
        assert len(connection.by_lookup) == 2 + left


@pytest.mark.parametrize(("size", "threads"), [(1 << 16, 4), (3 * LENGTH, 3)])
def test_threads_share_what_is_left(monkeypatch, size, threads):
    """Four read if the buffer has room for four; each has memory of its own, and what all have read
    is answered."""
    monkeypatch.setattr(buffered, "CHUNK_BYTES", LENGTH)
    together, places = threading.Barrier(threads), set()

    class Both(Scripted):
        def read_ranges(self, names, addresses, sizes):
            places.add(addresses[0][0])
            together.wait(60)
            return [LENGTH]

    thread_pool, some = ThreadPool("hicache-test", 3), reads(3 * threads)
    assert BufferedReader(size, thread_pool).read(Both([]), some, Call()).arrived == set(some)
    assert sorted(place - min(places) for place in places) == [
        number * (size // threads) for number in range(threads)
    ]
    thread_pool.close(60)


@pytest.mark.parametrize(
    ("code", "after", "again"), [(-800, 0.0, False), (-800, 60.0, True), (-704, 0.0, True)]
)
def test_memory_of_a_transfer_that_was_given_up_is_not_used_again(
    monkeypatch, alone, code, after, again
):
    """Only what the library gives up goes on; what fails before that has ended."""
    monkeypatch.setattr(library, "ABANDON_SECONDS", after)
    blocks, by_buffers = Blocks(lambda start, size: None), BufferedReader(1 << 16, alone)
    for each in (DirectReader(blocks, None), by_buffers):
        each.read(
            Scripted([code], [LENGTH], found=[library.NO_REPLICA_IN_MEMORY]), reads(1), Call()
        )
    assert bool(blocks._spare) is again
    assert bool(by_buffers._buffers._spare) is again
    assert bool(memory._unsafe) is not again
    memory._unsafe.clear()


def test_memory_is_used_again_where_nothing_arrives_later(monkeypatch, alone):
    monkeypatch.setattr(library, "ABANDON_SECONDS", 0.0)
    blocks, by_buffers = Blocks(lambda start, size: None), BufferedReader(1 << 16, alone)
    for each in (DirectReader(blocks, alone), by_buffers):
        each.read(Scripted([library.TRANSFER_FAILED], [LENGTH]), reads(1), Call())
    assert blocks._spare
    assert by_buffers._buffers._spare


def test_nothing_is_delivered_to_a_cancelled_call(alone):
    class Late(Scripted):
        def read_ranges(self, names, addresses, sizes):
            token.cancel()
            return [LENGTH]

    token = CancellationToken()
    call = Call(cancellation=token)
    some = [
        ObjectRead(SPACE, "key", [memoryview(bytearray(60)), memoryview(bytearray(40))], call=call)
    ]
    assert BufferedReader(1 << 16, alone).read(Late([LENGTH]), some, call).arrived == set()


def test_split_reads():
    """In order, of distinct objects, no longer and no larger than allowed; each read once."""
    some = reads(5)
    twice = some + some[:2] + some[:1]
    assert [list(part) for part in split_reads(some, 2)] == [some[:2], some[2:4], some[4:]]
    assert [list(part) for part in split_reads(some, 9, 2 * LENGTH)] == [
        some[:2],
        some[2:4],
        some[4:],
    ]
    assert [list(part) for part in split_reads(some, 9, 10)] == [[read] for read in some]
    assert [list(part) for part in split_reads(twice, 9)] == [some, some[:2], some[:1]]
    assert [list(part) for part in split_reads([], 9)] == []
    many = reads(BLOCK_ENVELOPES + 1)
    assert [len(part) for part in split_reads(many, BLOCK_ENVELOPES)] == [BLOCK_ENVELOPES, 1]
    assert buffered.MAX_BUFFERS > 1
