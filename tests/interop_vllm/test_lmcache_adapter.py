"""The adapter under LMCache's own interface, made by LMCache's factory, over objects of LMCache's."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.quota_manager import QuotaManager
from lmcache.v1.distributed.storage_controllers.eviction_controller import (
    L2AdapterEvictionState,
    L2EvictionController,
)
from prometheus_client import REGISTRY, generate_latest

from hicache_conformance.interfaces.lmcache_l2.storage import Arena, create_adapter
from hicache_storage.engines.lmcache import HiCacheL2Adapter
from hicache_storage.spec import ConfigError
from hicache_storage.tools.doctor import lmcache
from tests.interop.drivers import raise_os_error
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache.v1.memory_management import MemoryObj

pytestmark = [
    pytest.mark.vllm,
    # LMCache makes its loggers with what OpenTelemetry deprecates.
    pytest.mark.filterwarnings("ignore:.LoggingHandler.:DeprecationWarning"),
]

PLACES = 32
"""Objects that LMCache's arena has room for."""
SHAPE, DTYPE = torch.Size((2, 4, 64, 16)), torch.bfloat16
LAYOUT = MemoryLayoutDesc([SHAPE], [DTYPE])
SIZE = SHAPE.numel() * DTYPE.itemsize


class Server:
    """LMCache's side of an adapter: the arena, and objects in it."""

    def __init__(self, path: Path, layout: MemoryLayoutDesc = LAYOUT, **options: object) -> None:
        self._layout = layout
        self._arena = Arena({0: layout}, {0: PLACES})
        # More than a busy disk takes to make a file.
        options = {"deadline_seconds": 25.0, **options}
        parameters = {"driver": "file", "driver_config": {"path": str(path)}, **options}
        entry = {**lmcache.NAMES, "type": "plugin", "adapter_params": parameters}
        self.adapter = create_adapter(entry, self._arena.memory)

    def item(self, place: int) -> MemoryObj:
        """An object of the arena."""
        return self._arena.objects[0][place]

    def fill(self, place: int, seed: int) -> bytes:
        content = np.random.default_rng(seed).bytes(SIZE)
        np.frombuffer(self.item(place).byte_array, np.uint8)[:] = np.frombuffer(content, np.uint8)
        return content

    def bytes_at(self, place: int) -> bytes:
        return bytes(self.item(place).byte_array)

    def close(self) -> None:
        self.adapter.close()
        self._arena.close()

    def store(self, keys, objects) -> bool:
        task = self.adapter.submit_store_task(keys, objects)
        _wait(self.adapter.get_store_event_fd())
        [(done, result)] = self.adapter.pop_completed_store_tasks().items()
        assert done == task
        assert self.adapter.pop_completed_store_tasks() == {}
        return result.is_successful()

    def found(self, keys) -> list[bool]:
        groups = {key.object_group_id: self._layout for key in keys}
        task = self.adapter.submit_lookup_and_lock_task(keys, groups)
        _wait(self.adapter.get_lookup_and_lock_event_fd())
        return self._bits(self.adapter.query_lookup_and_lock_result, task)

    def load(self, keys, objects) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        _wait(self.adapter.get_load_event_fd())
        return self._bits(self.adapter.query_load_result, task)

    def _bits(self, query, task: int) -> list[bool]:
        # It is reported as an object, and a bitmap of no bits is false.
        [bitmap] = eventually(lambda: [found for found in [query(task)] if found is not None])
        assert query(task) is None
        return [bitmap.test(index) for index in range(len(bitmap))]


def _wait(descriptor: int) -> None:
    assert select.select([descriptor], [], [], 30)[0], "no event"
    # As LMCache's controllers do.
    os.eventfd_read(descriptor)


def keys(count: int, **other: object) -> list[ObjectKey]:
    given = {"model_name": "model", "kv_rank": 0x01000100, **other}
    return [ObjectKey(chunk_hash=bytes([number + 1]) * 32, **given) for number in range(count)]


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    yield made
    made.close()


def test_what_is_stored_is_found_and_loaded_elsewhere(server):
    contents = [server.fill(place, place) for place in range(8)]
    assert server.found(keys(9)) == [False] * 9
    assert server.store(keys(8), [server.item(place) for place in range(8)])
    assert server.found(keys(9)) == [True] * 8 + [False]
    assert server.load(keys(8), [server.item(20 + place) for place in range(8)]) == [True] * 8
    assert [server.bytes_at(20 + place) for place in range(8)] == contents
    status = server.adapter.report_status()
    assert (status["is_healthy"], status["pages_written"], status["pages_read"]) == (True, 8, 8)
    assert server.adapter.get_usage().total_bytes_used == 8 * SIZE


def test_of_eight_objects_one_is_damaged_and_seven_are_delivered(server, tmp_path):
    contents = [server.fill(place, place) for place in range(8)]
    assert server.store(keys(8), [server.item(place) for place in range(8)])
    server.adapter.close()
    [bundle] = tmp_path.rglob("*.bundle")
    with bundle.open("r+b") as file:
        file.seek(bundle.stat().st_size // 2)
        file.write(bytes(range(100, 164)))
    again = Server(tmp_path)
    assert again.found(keys(8)) == [True] * 8
    delivered = again.load(keys(8), [again.item(place) for place in range(8)])
    assert delivered.count(False) == 1
    for place, content in enumerate(contents):
        assert not delivered[place] or again.bytes_at(place) == content
    assert again.adapter.report_status()["pages_damaged"] == 1
    # It does not exist any more, and can be stored again.
    assert again.found(keys(8)) == delivered
    place = delivered.index(False)
    again.fill(place, place)
    assert again.store([keys(8)[place]], [again.item(place)])
    assert again.load(keys(8), [again.item(9 + other) for other in range(8)]) == [True] * 8
    again.close()


@pytest.mark.parametrize(
    "other",
    [{"model_name": "other"}, {"kv_rank": 0x02000200}, {"object_group_id": 1}, {"cache_salt": "s"}],
)
def test_keys_that_differ_name_other_objects(server, other):
    server.fill(0, 1)
    assert server.store(keys(1), [server.item(0)])
    assert server.found(keys(1, **other)) == [False]
    assert server.load(keys(1, **other), [server.item(1)]) == [False]


def test_salts_take_neither_threads_nor_descriptors(server):
    """Clients choose them."""
    content = server.fill(0, 1)
    assert server.store(keys(1), [server.item(0)])
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(100):
        assert server.found(keys(1, cache_salt=f"client {number}")) == [False]
    # The adapter's own threads for lookups, and that of their deadlines: a tenth of the salts.
    assert threading.active_count() <= threads + 10
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 10
    salted = keys(1, cache_salt="client 7")
    other = server.fill(1, 2)
    assert server.store(salted, [server.item(1)])
    # Both in one task.
    assert server.load([*keys(1), *salted], [server.item(2), server.item(3)]) == [True, True]
    assert (server.bytes_at(2), server.bytes_at(3)) == (content, other)


def test_another_dtype_of_the_same_width_reads_nothing(server, tmp_path):
    # LMCache's own keys are equal.
    server.fill(0, 1)
    assert server.store(keys(1), [server.item(0)])
    for shape, dtype in ((SHAPE, torch.float16), (torch.Size(reversed(SHAPE)), DTYPE)):
        other = Server(tmp_path, MemoryLayoutDesc([shape], [dtype]))
        assert other.found(keys(1)) == [False]
        assert other.load(keys(1), [other.item(1)]) == [False]
        other.close()


class Heard(L2AdapterListener):
    """The events of an adapter, by their kind."""

    def __init__(self) -> None:
        self.stored, self.accessed, self.deleted = [], [], []

    def on_l2_keys_stored(self, keys, sizes):
        self.stored += keys

    def on_l2_keys_accessed(self, keys):
        self.accessed += keys

    def on_l2_keys_deleted(self, keys):
        self.deleted += keys


def test_objects_are_accessed_when_they_are_delivered(server):
    heard = Heard()
    server.adapter.register_listener(heard)
    assert server.store(keys(1), [server.item(0)])
    assert server.found(keys(2)) == [True, False]
    assert (heard.stored, heard.accessed) == (keys(1), [])
    assert server.load(keys(2), [server.item(1), server.item(2)]) == [True, False]
    assert (heard.accessed, heard.deleted) == (keys(1), [])


@pytest.fixture
def heard(server):
    made = Heard()
    server.adapter.register_listener(made)
    return made


def stored(server, *groups: list[ObjectKey]) -> None:
    everything = [key for group in groups for key in group]
    assert server.store(everything, [server.item(place) for place in range(len(everything))])


def used(server) -> dict[str, int]:
    """Bytes by salt, as LMCache's quotas see them."""
    usage = server.adapter.get_usage()
    assert usage.total_bytes_used == sum(usage.bytes_by_cache_salt.values())
    return dict(usage.bytes_by_cache_salt)


def test_objects_are_counted_once(server, heard, tmp_path):
    for _ in range(2):
        stored(server, keys(2), keys(1, cache_salt="s"))
    assert (used(server), heard.stored) == (
        {"": 2 * SIZE, "s": SIZE},
        [*keys(2), *keys(1, cache_salt="s")],
    )
    # Those that were there before, when they are first delivered.
    again = Server(tmp_path)
    assert again.found(keys(2)) == [True, True]
    for _ in range(2):
        assert again.load(keys(1), [again.item(0)]) == [True]
    assert used(again) == {"": SIZE}
    again.close()


def test_deleted_objects_are_gone_and_their_bytes_too(server, heard, tmp_path):
    salted = keys(3, cache_salt="s")
    stored(server, keys(3), salted)
    server.adapter.delete([keys(3)[1], *salted[1:], *keys(1, model_name="other")])
    assert server.found([*keys(3), *salted]) == [True, False, True, True, False, False]
    assert used(server) == {"": 2 * SIZE, "s": SIZE}
    assert heard.deleted == [keys(3)[1], *salted[1:]]
    # Once: the store reports them, too.
    server.adapter.delete(salted)
    assert used(server) == {"": 2 * SIZE}
    assert heard.deleted == [keys(3)[1], *salted[1:], salted[0]]
    other = Server(tmp_path)
    assert other.found([*keys(3), *salted]) == [True, False, True, False, False, False]
    other.close()


def test_objects_that_others_remove_are_reported(server, heard, tmp_path):
    stored(server, keys(3))
    other = Server(tmp_path)
    assert other.found(keys(3)) == [True] * 3
    other.adapter.delete(keys(2))
    eventually(lambda: heard.deleted == keys(2))
    assert used(server) == {"": SIZE}
    other.close()


def test_what_cannot_be_deleted_stays(tmp_path, trouble):
    server, heard = Server(tmp_path, driver="sample", driver_config={}), Heard()
    server.adapter.register_listener(heard)
    stored(server, keys(1))
    server.adapter.delete(keys(1))
    assert (used(server), heard.deleted, server.adapter.refused_calls) == ({"": SIZE}, [], 1)
    assert server.found(keys(1)) == [True]
    server.close()


def test_a_quota_by_salt_frees_what_it_says(server, heard):
    """By LMCache's own controller, whose eviction asks for the bytes and deletes."""
    quotas = QuotaManager()
    quotas.set_quota("kept", 4 * SIZE)
    quotas.set_quota("half", 2 * SIZE)
    policy = EvictionConfig("IsolatedLRU", trigger_watermark=1.0, eviction_ratio=0.5)
    controller = L2EvictionController([L2AdapterEvictionState(0, server.adapter, policy)], quotas)
    groups = {salt: keys(3, cache_salt=salt) for salt in ("kept", "half", "none")}
    stored(server, *groups.values())
    controller.start()
    eventually(lambda: used(server).keys() == {"kept", "half"} and len(heard.deleted) > 3)
    controller.stop()
    left = [key for group in groups.values() for key in group if key not in heard.deleted]
    assert used(server)["kept"] == 3 * SIZE
    assert used(server)["half"] <= 2 * SIZE
    everything = [key for group in groups.values() for key in group]
    assert server.found(everything) == [key in left for key in everything]
    assert sum(used(server).values()) == len(left) * SIZE


def test_known_objects_are_listed_page_by_page(server):
    stored(server, keys(5), keys(2, model_name="other"))
    server.adapter.delete(keys(5)[2:3])
    listed, token = [], None
    while True:
        page = server.adapter.list_l2_keys("model", page_size=3, cursor=token)
        assert 0 < len(page.entries) <= 3
        listed += [(entry.key.to_object_key(), entry.size_bytes) for entry in page.entries]
        if (token := page.next_page_token) is None:
            break
        # What comes or goes meanwhile takes no place of the others.
        server.adapter.delete(keys(1))
    assert listed == [(keys(5)[number], SIZE) for number in (0, 1, 3, 4)]
    assert len(server.adapter.list_l2_keys().entries) == 5
    for bad in ({"page_size": 0}, {"cursor": "nonsense"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            server.adapter.list_l2_keys(**bad)


def test_the_counters_are_in_the_registry_that_lmcache_serves(server, tmp_path):
    other = Server(tmp_path)
    assert server.store(keys(2), [server.item(0), server.item(1)])
    assert other.load(keys(2), [other.item(0), other.item(1)]) == [True, True]
    text = generate_latest(REGISTRY).decode()
    for metric in ("written", "read"):
        assert f'hicache_storage_{metric}_pages_total{{driver="file",pool="kv"}} 2.0' in text
    other.close()
    text = generate_latest(REGISTRY).decode()
    assert 'hicache_storage_read_pages_total{driver="file",pool="kv"} 0.0' in text


def test_an_object_that_lmcache_has_transformed_is_not_stored(server):
    item = server.item(0)
    item.set_used_size(SIZE - 100)
    assert not server.store(keys(1), [item])
    assert server.found(keys(1)) == [False]
    assert server.adapter.refused_calls == 1


def test_a_storage_that_raises_is_a_miss(tmp_path, trouble):
    server = Server(tmp_path, driver="unruly", driver_config={})
    assert server.store(keys(1), [server.item(0)])
    trouble.at("exists", "get", "set", answer=raise_os_error)
    assert server.found(keys(1)) == [False]
    assert server.load(keys(1), [server.item(1)]) == [False]
    assert not server.store(keys(1), [server.item(0)])
    assert server.adapter.refused_calls == 3
    server.close()


def test_tasks_behind_hung_ones_are_misses_at_their_deadline(tmp_path, monkeypatch):
    """And LMCache, which waits for the descriptor, is told."""
    server = Server(tmp_path, threads=1)
    server.fill(0, 1)
    assert server.store(keys(1), [server.item(0)])
    [storage] = server.adapter._storages.values()
    hung, go_on = threading.Semaphore(0), threading.Event()

    def hang(asked, *_: object, **__: object):
        hung.release()
        assert go_on.wait(60)
        return [False] if isinstance(asked[0], str) else {"kv": [False]}

    for call in ("batch_present", "batch_get_v2"):
        monkeypatch.setattr(storage, call, hang)
    server.adapter.submit_lookup_and_lock_task(keys(1), {0: LAYOUT})
    server.adapter.submit_load_task(keys(1), [server.item(1)])
    for _ in range(2):
        assert hung.acquire(timeout=60)
    # Only for those that wait: a busy machine may begin a task later than that.
    for calls in (server.adapter._lookups, server.adapter._loads):
        calls._deadline_seconds = 0.1
    assert server.found(keys(1)) == [False]
    assert server.load(keys(1), [server.item(2)]) == [False]
    assert server.adapter.refused_calls == 2
    go_on.set()
    server.close()


def test_each_kind_of_task_has_a_descriptor_of_its_own(server):
    kinds = ("store", "lookup_and_lock", "load")
    assert len({getattr(server.adapter, f"get_{kind}_event_fd")() for kind in kinds}) == 3


def test_a_configuration_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="pth"):
        Server(tmp_path, driver_config={"pth": "/x"})


def test_an_arena_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="no contiguous L1 arena"):
        HiCacheL2Adapter({"driver": "file", "driver_config": {"path": str(tmp_path)}})
