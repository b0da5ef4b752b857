from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_backends.mooncake.client import connection
from hicache_backends.mooncake.client.handle import connections
from hicache_storage.spec import Durability, StorageClosedError, StorageForkedError
from tests.backends.file.harness import COMPONENTS, chain, content, identity, interrupted
from tests.backends.mooncake.harness import Rig
from tests.support.commands import run_python
from tests.support.forking import in_child
from tests.support.waiting import eventually


def test_only_opening_needs_the_library_and_names_it(cluster):
    source = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from hicache_storage import StorageIdentity, create_storage\n"
        "identity = StorageIdentity(model='m', kv_dtype='b', page_size=1, layout='l')\n"
        "storage = create_storage('mooncake', identity, {'master_server_address': '127.0.0.1:1'})\n"
        "print('torch' in sys.modules, 'mooncake.store' in sys.modules, storage.health().detail)\n"
        "storage.close()\n"
        f"create_storage('mooncake', identity, {cluster.options!r}).open()\n"
    )
    done = run_python(source, status=1)
    assert done.stdout.startswith(
        "False False StorageUnavailableError: the master at 127.0.0.1:1 cannot be reached"
    )
    assert "driver 'mooncake' cannot load Mooncake" in done.stderr
    assert "pip install 'hicache-storage[mooncake]', and on Debian apt-get" in done.stderr


def test_a_request_names_as_many_as_can_be_answered_in_time(rig, monkeypatch):
    """Of 750,000 names in one request a busy master answered none before the request's limit."""
    one, keys = rig(), chain("many", 5)
    assert one.put(keys) == [True] * 5
    monkeypatch.setattr(connection, "MAX_NAMES", 2)
    with interrupted(one.connection, "_answered") as asked:
        assert one.hit([*keys, "missing"]) == 5
    assert [count for _, count in asked] == [2, 2, 2]
    with interrupted(one.connection, "_answered") as asked:
        assert one.storage.delete([*keys[1:], "missing"]) == [True] * 4 + [False]
    assert max(count for _, count in asked) == 2
    assert one.hit(keys) == 1


@pytest.mark.parametrize(
    "components", [COMPONENTS, (200_000, 100_003)], ids=["gathered", "scattered"]
)
def test_pages_that_are_there_are_not_sent_again(rig, components):
    """The library finds them when it is to begin them; nothing is asked before, and nothing of them
    is read."""
    one, keys = rig(components=components), chain("there", 6)
    names = [one.name(key) for key in keys]
    one.storage.open()
    with (
        interrupted(one.connection, "transfer") as transfers,
        interrupted(one.connection, "exist") as asked,
    ):
        for version, some in enumerate((keys[:2], keys, keys)):
            assert one.put(some, version=version) == [True] * len(some)
            sent = [name for names, *_ in transfers for name in names]
            assert sorted(sent) == sorted(names[: len(some)])
            assert asked == [(names[:2],), (names,)][:version]
    assert (one.stats().pages_written, one.stats().pages_refused) == (6, 0)
    one.expect(keys[:2])
    one.expect(keys[2:], version=1)


def test_a_process_that_lends_memory(cluster, rig):
    """Its pages are there for others as long as it is, and its memory is given back with its last
    storage."""
    lender = rig(global_segment_size="32mb", who=identity(model="lender"))
    assert lender.driver.capabilities.durability is Durability.NONE
    keys = chain("lent", 8)
    assert lender.put(keys) == [True] * 8
    assert cluster.capacity() == 2 * (64 << 20) + (32 << 20)
    reader = rig(who=identity(model="lender"))
    assert reader.driver.capabilities.durability is Durability.REOPEN
    reader.expect(keys)
    lender.storage.close()
    eventually(lambda: cluster.capacity() == 2 * (64 << 20))
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
        one.hit(["a"])


def at_once(count, call):
    """Make a call in some threads at the same time; their answers."""
    together = threading.Barrier(count)

    def made(number):
        together.wait()
        return call(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(made, range(count)))


def test_threads_that_write_one_page(rig):
    """All of them are told that it is stored, and it is."""
    rigs = [rig(wait_seconds=30) for _ in range(6)]
    keys = chain("race", 8)
    assert at_once(6, lambda number: rigs[number].put(keys)) == [[True] * 8] * 6
    rigs[0].expect(keys)


def test_threads_that_read_one_page(rig):
    """The library remembers one lookup of a name in a client, which all of them share."""
    rigs = [rig(components=(200_000, 100_003)) for _ in range(4)]
    keys = chain("readers", 8)
    assert rigs[0].put(keys) == [True] * 8
    pages = [content(key, 0, rigs[0].page_bytes) for key in keys]
    told = at_once(4, lambda number: rigs[number].get(keys[number % 2 :]))
    assert told == [pages, pages[1:]] * 2
    # The first one that ends leaves the lookup to the others.
    connection, name = rigs[0].connection, rigs[0].name(keys[0])
    with connection.looked_up([name]) as codes:
        assert codes == [0]
        assert rigs[1].get(keys[:1]) == pages[:1]
        assert connection.can_read(name)
    assert not connection._kept


def test_a_forked_child_is_refused_and_opens_none_of_its_own(rig, cluster):
    """The library's threads are not there, and it would hang; what is inherited is not closed, and
    the parent goes on."""
    one = rig()
    assert one.put(["parent's"]) == [True]
    connection = one.connection

    def in_own_storage():
        one.storage.close()
        own = Rig(cluster.options)
        with pytest.raises(StorageForkedError, match="spawn"):
            own.storage.open()
        return str(own.put(["child's"]))

    for work, answer in (
        (lambda: str(one.hit(["parent's"])), "StorageForkedError"),
        (lambda: connections.acquire(connection.settings), "StorageForkedError"),
        (in_own_storage, "[False]"),
    ):
        assert in_child(work, 60.0).startswith(answer)
    one.expect(["parent's"])


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
