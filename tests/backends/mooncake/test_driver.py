from __future__ import annotations

import os
import signal
import threading

import pytest

from hicache_backends.mooncake.client.handle import connections
from hicache_storage.spec import Durability, HungReads, StorageClosedError, StorageForkedError
from tests.backends.mooncake.harness import COMPONENTS, Rig, chain, content, identity
from tests.support.commands import run_python


def test_importing_and_constructing_need_no_library():
    source = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from hicache_storage import StorageIdentity, create_storage\n"
        "identity = StorageIdentity(model='m', kv_dtype='b', page_size=1, layout='l')\n"
        "storage = create_storage('mooncake', identity, {'master_server_address': '127.0.0.1:1'})\n"
        "print('torch' in sys.modules, 'mooncake.store' in sys.modules, storage.health().detail)\n"
        "storage.close()\n"
    )
    done = run_python(source)
    assert done.stdout.startswith(
        "False False StorageUnavailableError: the master at 127.0.0.1:1 cannot be reached"
    )


def test_a_library_that_is_missing_is_named(cluster):
    source = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from hicache_storage import StorageIdentity, create_storage\n"
        "identity = StorageIdentity(model='m', kv_dtype='b', page_size=1, layout='l')\n"
        f"create_storage('mooncake', identity, {cluster.options!r}).open()\n"
    )
    done = run_python(source, status=1)
    assert "driver 'mooncake' cannot load Mooncake" in done.stderr
    assert (
        "pip install 'hicache-storage[mooncake]', and on Debian apt-get install libibverbs1"
        in done.stderr
    )


@pytest.mark.parametrize(
    "components", [COMPONENTS, (200_000, 100_003)], ids=["gathered", "scattered"]
)
@pytest.mark.parametrize("way", ["wait", "bounce_buffer"])
def test_pages_come_back(rig, way, components):
    one = rig(hung_reads=way, components=components)
    keys = chain(f"back {way}", 12)
    assert one.hits(keys) == 0
    assert one.put(keys) == [True] * 12
    assert one.hits(keys) == 12
    one.expect(keys)
    assert one.driver.capabilities.hung_reads is HungReads(way)
    assert one.storage.delete(keys[3:5]) == [True, True]
    assert one.storage.delete(keys[3:5]) == [False, False]
    assert one.hits(keys) == 3


@pytest.mark.parametrize(
    "components", [COMPONENTS, (200_000, 100_003)], ids=["gathered", "scattered"]
)
def test_pages_that_are_there_are_not_sent_again(rig, monkeypatch, components):
    """The library finds them when it is to begin them; nothing is asked before, and nothing of them
    is read."""
    one, sent, asked = rig(components=components), [], []
    one.storage.open()
    connection = one.connection
    transfer, exist = connection.transfer, connection.exist
    monkeypatch.setattr(
        connection, "transfer", lambda names, *rest: (sent.extend(names), transfer(names, *rest))[1]
    )
    monkeypatch.setattr(connection, "exist", lambda names: (asked.append(names), exist(names))[1])
    keys = chain("there", 6)
    assert one.put(keys[:2]) == [True] * 2
    assert sorted(sent) == sorted(one.name(key) for key in keys[:2])
    assert asked == []
    assert one.put(keys, version=1) == [True] * 6
    assert sorted(sent) == sorted(one.name(key) for key in keys)
    assert asked == [[one.name(key) for key in keys[:2]]]
    assert one.put(keys, version=2) == [True] * 6
    assert len(sent) == 6
    assert (one.stats.pages_written, one.stats.pages_refused) == (6, 0)
    one.expect(keys[:2])
    one.expect(keys[2:], version=1)


def test_more_pages_than_one_request_takes(rig):
    one = rig(pages=600, components=(64,))
    keys = chain("many", 600)
    assert one.put(keys) == [True] * 600
    one.expect(keys)
    # Pages that go through a buffer which holds three of them.
    small = rig(pages=600, components=(64,), hung_reads="bounce_buffer", buffer_size=3 * 128)
    small.expect(keys)
    # More than are gathered for one request.
    large = rig(pages=70, components=(250_000,))
    assert large.put(keys[:70]) == [True] * 70
    large.expect(keys[:70])


def test_a_process_that_lends_memory(cluster, rig):
    """Its pages are there for others as long as it is, and its memory is given back with its last
    storage."""
    lender = rig(global_segment_size="32mb", who=identity(model="lender"))
    assert lender.driver.capabilities.durability is Durability.NONE
    keys = chain("lent", 8)
    assert lender.put(keys) == [True] * 8
    reader = rig(who=identity(model="lender"))
    assert reader.driver.capabilities.durability is Durability.REOPEN
    reader.expect(keys)
    settings = lender.driver._settings
    assert settings in connections._entries
    lender.storage.close()
    assert settings not in connections._entries
    for page, key in zip(reader.get(keys), keys, strict=True):
        assert page in (None, content(key, 0, reader.page_bytes))


def test_storages_share_a_client(rig):
    one, two = rig(), rig(who=identity(model="two"))
    one.storage.open()
    two.storage.open()
    assert one.connection is two.connection
    one.storage.close()
    assert two.put(chain("shared", 1)) == [True]
    with pytest.raises(StorageClosedError):
        one.hits(["a"])


def test_threads_that_write_one_page(rig):
    """All of them are told that it is stored, and it is."""
    rigs = [rig(wait_seconds=30) for _ in range(6)]
    keys, told = chain("race", 8), [None] * 6
    together = threading.Barrier(6)

    def write(number):
        together.wait()
        told[number] = rigs[number].put(keys)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [[True] * 8] * 6
    rigs[0].expect(keys)


@pytest.mark.parametrize("way", ["wait", "bounce_buffer"])
def test_threads_that_read_one_page(rig, way):
    """The library remembers one lookup of a name in a client, which all of them share."""
    rigs = [rig(components=(200_000, 100_003), hung_reads=way) for _ in range(4)]
    keys, told = chain(f"readers {way}", 8), [None] * 4
    assert rigs[0].put(keys) == [True] * 8
    together = threading.Barrier(4)

    def read(number):
        together.wait()
        told[number] = rigs[number].get(keys[number % 2 :])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pages = [content(key, 0, rigs[0].page_bytes) for key in keys]
    assert told == [pages, pages[1:]] * 2
    connection = rigs[0].connection
    assert not connection._kept
    # The first one that ends leaves the lookup to the others.
    name = rigs[0].name(keys[0])
    with connection.looked_up([name]) as codes:
        assert codes == [0]
        assert rigs[1].get(keys[:1]) == pages[:1]
        assert connection.can_read(name)
        assert connection._kept == {name: 1}


def test_a_set_that_is_too_late_publishes_nothing(rig):
    one = rig()
    keys = chain("late", 4)
    assert one.put(keys, seconds=1e-9) == [False] * 4
    assert one.hits(keys) == 0
    assert one.put(keys) == [True] * 4


def end_after(seconds):
    """Have a child killed that hangs in the library, where no handler of Python's runs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def test_a_forked_child_is_refused(rig):
    one = rig()
    assert one.put(["a"]) == [True]
    child = os.fork()
    if not child:
        try:
            one.hits(["a"])
        except StorageForkedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.expect(["a"])


def test_a_forked_child_opens_none_of_its_own(rig, cluster):
    """The library's threads are not there, and it would hang; what is inherited is not closed, and
    the parent goes on."""
    one = rig()
    assert one.put(["parent's"]) == [True]
    child = os.fork()
    if not child:
        end_after(60)
        one.storage.close()
        own = Rig(cluster.options)
        try:
            own.storage.open()
        except StorageForkedError as error:
            os._exit(7 if "spawn" in str(error) and own.put(["child's"]) == [False] else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.expect(["parent's"])


def test_a_forked_child_replaces_no_connection(rig):
    one = rig()
    assert one.put(["parent's"]) == [True]
    child = os.fork()
    if not child:
        end_after(60)
        try:
            connections.replace(one.connection)
        except StorageForkedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_child_forked_before_the_first_storage_opens_its_own(cluster):
    source = (
        "import os, sys, signal\n"
        "from tests.backends.mooncake.harness import Rig\n"
        f"rig = Rig({cluster.options!r})\n"
        "child = os.fork()\n"
        "if not child: signal.alarm(60)\n"
        "stored = rig.put(['by both'])\n"
        "rig.storage.close()\n"
        "if not child: os._exit(7 if stored == [True] else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stored)\n"
    )
    done = run_python(source)
    assert done.stdout.split() == ["7", "[True]"], done.stderr
