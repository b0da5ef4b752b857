"""What readers make of the library's answers: arrived, missing, damaged, failed, and given up."""

from __future__ import annotations

import pytest

from hicache_backends.mooncake import memory, reader
from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.crew import Crew
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, Blocks
from hicache_backends.mooncake.reader import BufferedReader, DirectReader, rounds
from hicache_storage.objects import Call, Namespace, ObjectRead
from hicache_storage.spec import PageGeometry, PoolName, StorageUnavailableError
from tests.backends.mooncake.harness import identity

LENGTH = 100 + 64
SPACE = Namespace(identity(), PoolName("kv"), PageGeometry("page_first", "bfloat16", 4, 16, (60, 40)))


class Scripted:
    """Stands for a connection: answers codes, and lengths where it is asked for one."""

    def __init__(self, codes, lengths=()):
        self.codes, self.lengths, self.asked = codes, list(lengths), 0

    def read(self, names, addresses, sizes):
        return self.codes

    def size(self, name):
        self.asked += 1
        length = self.lengths.pop(0)
        if isinstance(length, Exception):
            raise length
        return length


def reads(count):
    return [ObjectRead(SPACE, f"key {number}", [memoryview(bytearray(60)), memoryview(bytearray(40))]) for number in range(count)]


@pytest.fixture(params=["waits", "buffered"])
def ways(request):
    return DirectReader(Blocks(lambda start, size: None)) if request.param == "waits" else BufferedReader(1 << 16, Crew())


def test_answers(ways):
    """A miss, an object of another length, and failed transfers, of which the length tells damage from faults."""
    some = reads(7)
    codes = [LENGTH, library.NOT_FOUND, 50, library.TRANSFER_FAILED, library.TRANSFER_FAILED, library.INVALID_PARAMS, -1]
    outcome = ways.read(Scripted(codes, [LENGTH, 50, library.NOT_FOUND]), some, Call())
    assert outcome.arrived == {some[0]}
    # Whether what has arrived is the page is another question.
    assert [read.damaged for read in some[1:]] == [False, True, False, True, False, False]
    assert [str(fault) for fault in outcome.faults] == [
        f"an object cannot be read (code {code})" for code in (-1, library.TRANSFER_FAILED)
    ]


@pytest.mark.parametrize("answer", [library.RPC_TIMED_OUT, StorageUnavailableError("no master")], ids=["code", "error"])
def test_a_master_that_goes_while_lengths_are_asked_for(ways, answer):
    """It is asked once more at most: each request may take as long as the master is waited for."""
    connection = Scripted([library.TRANSFER_FAILED] * 5, [50, answer])
    some = reads(5)
    outcome = ways.read(connection, some, Call())
    assert connection.asked == 2
    assert len(outcome.faults) == 4
    assert [read.damaged for read in some] == [True, False, False, False, False]


@pytest.mark.parametrize(("code", "after", "again"), [(-800, 0.0, False), (-800, 60.0, True), (-704, 0.0, True)])
def test_memory_of_a_transfer_that_was_given_up_is_not_used_again(monkeypatch, code, after, again):
    """Only what the library gives up goes on; what fails before that has ended."""
    monkeypatch.setattr(library, "GIVES_UP_SECONDS", after)
    blocks, buffered = Blocks(lambda start, size: None), BufferedReader(1 << 16, Crew())
    for each in (DirectReader(blocks), buffered):
        each.read(Scripted([code], [LENGTH]), reads(1), Call())
    assert bool(blocks._spare) is again
    assert bool(buffered._buffers._spare) is again
    assert bool(memory._spoilt) is not again
    memory._spoilt.clear()


def test_nothing_is_delivered_to_who_has_left():
    class Gone:
        gone = True

        def __enter__(self):
            return False

        def __exit__(self, *_):
            return None

    class Late(Scripted):
        def read(self, names, addresses, sizes):
            call._caller = Gone()
            return self.codes

    call = Call()
    some = [ObjectRead(SPACE, "key", [memoryview(bytearray(60)), memoryview(bytearray(40))], call=call)]
    assert BufferedReader(1 << 16, Crew()).read(Late([LENGTH]), some, call).arrived == set()


def test_rounds():
    """In order, of distinct objects, no longer and no larger than allowed; each read once."""
    some = reads(5)
    twice = some + some[:2] + some[:1]
    assert [list(part) for part in rounds(some, 2)] == [some[:2], some[2:4], some[4:]]
    assert [list(part) for part in rounds(some, 9, 2 * LENGTH)] == [some[:2], some[2:4], some[4:]]
    assert [list(part) for part in rounds(some, 9, 10)] == [[read] for read in some]
    assert [list(part) for part in rounds(twice, 9)] == [some, some[:2], some[:1]]
    assert [list(part) for part in rounds([], 9)] == []
    many = reads(BLOCK_ENVELOPES + 1)
    assert [len(part) for part in rounds(many, BLOCK_ENVELOPES)] == [BLOCK_ENVELOPES, 1]
    assert reader.MOST_BUFFERS > 1
