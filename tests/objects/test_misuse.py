"""What `ObjectStorage` refuses before any I/O."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.spec import (
    InvalidTransferError,
    PoolTransfer,
    UnknownPoolError,
    UnsupportedOperationError,
)


class TestMisuse:
    """FT-2: told by name, before the driver is asked anything."""

    @pytest.mark.parametrize(
        ("transfer", "message"),
        [
            (PoolTransfer("mamba", torch.arange(2), keys=["a"]), "'mamba' is not registered; registered: kv"),
            (PoolTransfer("kv", torch.arange(2)), "keys is None"),
            (PoolTransfer("kv", torch.arange(2), keys="a"), "keys is one text"),
            (PoolTransfer("kv", torch.arange(2), keys=[b"a"]), "keys must be text, got bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["a" * 513]), "513 bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["ä" * 257]), "514 bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["a\0"]), "contains NUL"),
            (PoolTransfer("kv", torch.arange(2), keys=["\ud800"]), "lone surrogate"),
            (PoolTransfer("kv", None, keys=["a"]), "host_indices is None; pass 2 slots for 1 keys"),
            (PoolTransfer("kv", torch.arange(2, dtype=torch.int32), keys=["a"]), "int64 tensor, got torch.int32"),
            (PoolTransfer("kv", [0, 1], keys=["a"]), "int64 tensor, got list"),
            (PoolTransfer("kv", torch.arange(2), keys=["a", "b"]), "2 keys x 2 slots = 4 entries"),
            (PoolTransfer("kv", torch.arange(4), keys=["a"]), "1 keys x 2 slots = 2 entries"),
            (PoolTransfer("kv", torch.arange(4).view(2, 2), keys=["a", "b"]), "in one dimension"),
            (PoolTransfer("kv", torch.tensor([1, 0]), keys=["a"]), "2 consecutive slots"),
            (PoolTransfer("kv", torch.tensor([1, 2]), keys=["a"]), "multiples of 2"),
            (PoolTransfer("kv", torch.tensor([16, 17]), keys=["a"]), r"in \[0, 16\)"),
            (PoolTransfer("kv", torch.tensor([-2, -1]), keys=["a"]), r"in \[0, 16\)"),
            (PoolTransfer("kv", indices_from_pool="swa", keys=["a"]), "indices_from_pool names 'swa'"),
        ],
    )
    @pytest.mark.parametrize("operation", ["batch_get_v2", "batch_set_v2"])
    def test_bad_transfers(self, kit, operation, transfer, message):
        storage, pool = kit.dict_storage()
        good = pool.transfer("kv", ["good"], [3])
        with pytest.raises(InvalidTransferError, match=message):
            getattr(storage, operation)([good, transfer])
        assert storage.asked == []

    def test_a_page_read_into_twice(self, kit):
        storage, pool = kit.dict_storage()
        with pytest.raises(InvalidTransferError, match="name a page twice"):
            storage.batch_get_v2([pool.transfer("kv", ["a"], [0]), pool.transfer("kv", ["b"], [0])])

    def test_a_device_tensor_of_indices(self, kit):
        storage, _pool = kit.dict_storage()
        indices = torch.arange(2, device="meta")
        with pytest.raises(InvalidTransferError, match="must be on the CPU, got meta"):
            storage.batch_get_v2([PoolTransfer("kv", indices, keys=["a"])])

    def test_strided_indices_are_fine(self, kit):
        storage, _pool = kit.dict_storage()
        indices = torch.tensor([[0, 9], [1, 9], [2, 9], [3, 9]])[:, 0]
        assert storage.batch_set_v2([PoolTransfer("kv", indices, keys=["a", "b"])]) == {"kv": [True, True]}

    def test_operations_that_are_not_declared(self, kit):
        from hicache_storage.spec import Capabilities

        storage, _pool = kit.dict_storage(capabilities=Capabilities())
        with pytest.raises(UnsupportedOperationError, match="'deletes'"):
            storage.delete(["a"])
        with pytest.raises(UnsupportedOperationError, match="'clears'"):
            storage.clear()

    def test_delete_in_an_unknown_pool(self, kit):
        storage, _ = kit.dict_storage()
        with pytest.raises(UnknownPoolError, match="swa"):
            storage.delete(["a"], pool="swa")
