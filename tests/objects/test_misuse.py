"""`ObjectStorage` refuses misuse before any I/O."""

from __future__ import annotations

import numpy
import pytest
import torch

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.observability.tracing import disable, enable
from hicache_storage.spec import (
    DriverContractError,
    HiCacheStorageExtraInfo,
    InvalidTransferError,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    UnknownPoolError,
    UnsupportedOperationError,
)
from hicache_storage.testing import MemoryStorage


class TestMisuse:
    """FT-2: told by name, before the driver is asked anything."""

    @pytest.mark.parametrize(
        ("transfer", "message"),
        [
            (
                PoolTransfer("mamba", torch.arange(2), keys=["a"]),
                "'mamba' is not registered; registered: kv",
            ),
            (PoolTransfer("kv", torch.arange(2)), "keys is None"),
            (PoolTransfer("kv", torch.arange(2), keys="a"), "keys is one text"),
            (PoolTransfer("kv", torch.arange(2), keys=[b"a"]), "keys must be text, got bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=b"a"), "pool 'kv': keys is one text"),
            (
                PoolTransfer("kv", torch.arange(2), keys=3),
                "pool 'kv': keys must be a list of page keys, got int",
            ),
            (PoolTransfer("kv", torch.arange(2), keys=iter(["a"])), "got list_iterator; pass list"),
            (PoolTransfer("kv", torch.arange(2), keys=numpy.array(["a"])), "got ndarray"),
            (PoolTransfer("kv", torch.arange(2), keys={"a": 0}), "got dict"),
            (PoolTransfer("kv", torch.arange(2), keys=["a" * 513]), "513 bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["ä" * 257]), "514 bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["a\0"]), "contains NUL"),
            (PoolTransfer("kv", torch.arange(2), keys=["\ud800"]), "lone surrogate"),
            (PoolTransfer("kv", None, keys=["a"]), "host_indices is None; pass 2 slots for 1 keys"),
            (
                PoolTransfer("kv", torch.arange(2, dtype=torch.int32), keys=["a"]),
                "int64 tensor, got torch.int32",
            ),
            (PoolTransfer("kv", [0, 1], keys=["a"]), "int64 tensor, got list"),
            (PoolTransfer("kv", torch.arange(2), keys=["a", "b"]), "2 keys x 2 slots = 4 entries"),
            (PoolTransfer("kv", torch.arange(4), keys=["a"]), "1 keys x 2 slots = 2 entries"),
            (PoolTransfer("kv", torch.arange(4).view(2, 2), keys=["a", "b"]), "in one dimension"),
            (PoolTransfer("kv", torch.tensor([1, 0]), keys=["a"]), "2 consecutive slots"),
            (PoolTransfer("kv", torch.tensor([1, 2]), keys=["a"]), "multiples of 2"),
            (PoolTransfer("kv", torch.tensor([16, 17]), keys=["a"]), r"in \[0, 16\)"),
            (PoolTransfer("kv", torch.tensor([-2, -1]), keys=["a"]), r"in \[0, 16\)"),
            (
                PoolTransfer("kv", indices_from_pool="swa", keys=["a"]),
                "indices_from_pool names 'swa'",
            ),
        ],
    )
    @pytest.mark.parametrize("operation", ["batch_get_v2", "batch_set_v2"])
    def test_bad_transfers(self, kit, operation, transfer, message):
        storage, pool = kit.memory_storage()
        good = pool.transfer("kv", ["good"], [3])
        with pytest.raises(InvalidTransferError, match=message):
            getattr(storage, operation)([good, transfer])
        assert storage.operations == []

    def test_a_page_read_into_twice(self, kit):
        storage, pool = kit.memory_storage()
        with pytest.raises(InvalidTransferError, match="name a page twice"):
            storage.batch_get_v2([pool.transfer("kv", ["a"], [0]), pool.transfer("kv", ["b"], [0])])

    def test_a_device_tensor_of_indices(self, kit):
        storage, _pool = kit.memory_storage()
        indices = torch.arange(2, device="meta")
        with pytest.raises(InvalidTransferError, match="must be on the CPU, got meta"):
            storage.batch_get_v2([PoolTransfer("kv", indices, keys=["a"])])

    def test_strided_indices_are_fine(self, kit):
        storage, _pool = kit.memory_storage()
        indices = torch.tensor([[0, 9], [1, 9], [2, 9], [3, 9]])[:, 0]
        assert storage.batch_set_v2([PoolTransfer("kv", indices, keys=["a", "b"])]) == {
            "kv": [True, True]
        }

    def test_operations_that_are_not_declared(self, kit):
        from hicache_storage.spec import Capabilities

        storage, _pool = kit.memory_storage(capabilities=Capabilities())
        with pytest.raises(UnsupportedOperationError, match="'deletes'"):
            storage.delete(["a"])
        with pytest.raises(UnsupportedOperationError, match="'clears'"):
            storage.clear()

    def test_delete_in_an_unknown_pool(self, kit):
        storage, _ = kit.memory_storage()
        with pytest.raises(UnknownPoolError, match="swa"):
            storage.delete(["a"], pool="swa")


NO_LISTS = [
    "ab",
    b"ab",
    None,
    7,
    iter(["a"]),
    (key for key in "ab"),
    numpy.array(["a", "b"]),
    {"a", "b"},
]


@pytest.fixture(params=["bare", "layers", "traced"])
def around(kit, request):
    """A dict with the page `a`: by itself, in the default layers of a breaker that takes one fault,
    and traced."""
    storage, pool = kit.memory_storage()
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    if request.param == "traced":
        enable()
    layers = wrap(storage, StorageOptions(breaker_threshold=1, traces=request.param == "traced"))
    layers.register_mem_host_pool_v2(pool, "kv")
    storage.operations.clear()
    yield storage if request.param == "bare" else layers, storage, pool
    disable()


class TestNoList:
    """FT-2: told by name and before any I/O; and nobody's fault, so that no breaker opens for
    it."""

    @pytest.mark.parametrize("keys", NO_LISTS, ids=lambda keys: type(keys).__name__)
    def test_keys(self, around, keys):
        """`delete("ab")` deleted the pages `a` and `b`; five deletes of an iterator opened the
        breaker for everybody."""
        asked, storage, pool = around
        for call in (
            asked.batch_exists_v2,
            asked.delete,
            lambda keys: asked.batch_get_v2(
                [PoolTransfer("kv", pool.transfer("kv", ["a"], [0]).host_indices, keys=keys)]
            ),
            lambda keys: asked.batch_exists_v2(
                ["a"], None, HiCacheStorageExtraInfo(prefix_keys=0 if keys is None else keys)
            ),
        ):
            with pytest.raises(InvalidTransferError, match="keys"):
                call(keys)
        assert storage.operations == []
        assert (asked.fault_count(), asked.get_stats().breaker_state) == (0, "closed")

    @pytest.mark.parametrize("keys", [[1], [b"a"], ["a\0"], ["\ud800"], ["a" * 513], ["a", None]])
    def test_prefix_keys_are_keys(self, around, keys):
        asked, storage, pool = around
        extra = HiCacheStorageExtraInfo(prefix_keys=keys)
        for call in (
            lambda: asked.batch_exists_v2(["a"], None, extra),
            lambda: asked.batch_get_v2([pool.transfer("kv", ["a"], [0])], extra),
            lambda: asked.batch_set_v2([pool.transfer("kv", ["b"], [0])], extra),
        ):
            with pytest.raises(InvalidTransferError):
                call()
        assert storage.operations == []
        assert (asked.fault_count(), asked.get_stats().breaker_state) == (0, "closed")

    @pytest.mark.parametrize("is_open", [False, True])
    @pytest.mark.parametrize("extra", [{"deadline_seconds": 1.0}, "chat_7", 1.0, [], 7], ids=repr)
    def test_extra_info(self, around, extra, is_open):
        """It was a bare AttributeError out of a layer, or taken for none."""
        asked, storage, pool = around
        for breaker in getattr(getattr(asked, "inner", asked), "breakers", {}).values():
            if is_open:
                breaker.failed()
        for call in (
            lambda: asked.batch_exists_v2(["a"], None, extra),
            lambda: asked.batch_present(["a"], extra_info=extra),
            lambda: asked.batch_get_v2([pool.transfer("kv", ["a"], [0])], extra),
            lambda: asked.batch_set_v2([pool.transfer("kv", ["b"], [0])], extra),
        ):
            with pytest.raises(InvalidTransferError, match="extra_info"):
                call()
        with pytest.raises(InvalidTransferError, match="cancellation"):
            HiCacheStorageExtraInfo(cancellation=extra)
        assert storage.operations == []
        assert asked.fault_count() == 0

    @pytest.mark.parametrize(
        "transfers", [None, 3, "kv", PoolTransfer("kv"), [None], ["kv"], iter([PoolTransfer("kv")])]
    )
    def test_transfers(self, around, transfers):
        asked, storage, _pool = around
        for call in (asked.batch_get_v2, asked.batch_set_v2):
            with pytest.raises(InvalidTransferError, match="transfers"):
                call(transfers)
        if transfers is not None:
            with pytest.raises(InvalidTransferError, match="transfers"):
                asked.batch_exists_v2(["a"], transfers)
        assert storage.operations == []

    @pytest.mark.parametrize(
        "keys",
        [3, "ab", iter(["a"]), numpy.array(["a", "b"])],
        ids=lambda keys: type(keys).__name__,
    )
    def test_the_window_of_a_policy(self, around, keys):
        asked, storage, _pool = around
        with pytest.raises(InvalidTransferError, match="pool 'kv': keys"):
            asked.batch_exists_v2(["a"], [PoolTransfer("kv", keys=keys)])
        assert storage.operations == []


class TestNoFields:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"name": None}, "a pool's name is a text"),
            ({"name": 3}, "a pool's name is a text"),
            ({"name": b"kv"}, "a pool's name is a text"),
            ({"name": "KV"}, "not of the form"),
            ({"name": "kv", "indices_from_pool": 3}, "a pool's name is a text"),
            ({"name": "kv", "hit_policy": "most"}, "hit_policy 'most' is none of all_pages"),
            ({"name": "kv", "hit_policy": None}, "hit_policy None"),
            (
                {"name": "kv", "hit_policy": PoolHitPolicy.BLOCK_GROUPS, "block_pages": "4"},
                "block_pages must be a number",
            ),
            (
                {
                    "name": "kv",
                    "hit_policy": PoolHitPolicy.BLOCK_GROUPS,
                    "block_pages": 4,
                    "group_pages": 1.5,
                },
                "group_pages",
            ),
        ],
    )
    def test_of_a_transfer(self, fields, message):
        with pytest.raises(InvalidTransferError, match=message):
            PoolTransfer(**fields)

    @pytest.mark.parametrize(
        "fields",
        [{"request_id": 5}, {"request_id": b"x"}, {"prefix_keys": "ab"}, {"prefix_keys": 3}],
    )
    def test_of_what_the_caller_knows(self, fields):
        with pytest.raises(InvalidTransferError, match=next(iter(fields))):
            HiCacheStorageExtraInfo(**fields)

    @pytest.mark.parametrize("name", [None, 3, b"kv"])
    def test_of_a_pool(self, around, kit, name):
        asked, _storage, pool = around
        for call in (
            lambda: asked.delete(["a"], pool=name),
            lambda: asked.register_mem_host_pool_v2(pool, name),
        ):
            with pytest.raises(InvalidTransferError, match="a pool's name is a text"):
                call()
        assert PoolName("kv") == "kv"


def _write(self, requests, call): ...


class Mixin:
    _write = _write


@pytest.mark.parametrize(
    ("bases", "members"), [((MemoryStorage,), {"_write": _write}), ((Mixin, MemoryStorage), {})]
)
def test_a_driver_that_replaces_a_private_method_is_refused_when_it_is_created(bases, members):
    with pytest.raises(DriverContractError, match=r"Acme defines _write, .* rename it$"):
        type("Acme", bases, members)


def test_names_that_the_base_class_does_not_use_are_free():
    assert type("Acme", (MemoryStorage,), {"_put": _write, "__private": _write})
