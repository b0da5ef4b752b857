"""`page_access` of pools that copy."""

from __future__ import annotations

import threading

import pytest
import torch

from hicache_storage.pools import page_access
from hicache_storage.pools.addressed import AddressedPages
from hicache_storage.pools.staged import StagedPages
from hicache_storage.spec import InvalidPoolError, PageGeometry
from tests.pools.foreign import (
    PAGES,
    WIDTH,
    AddressPool,
    FlatPool,
    P,
    WithoutAddresses,
    read,
    some_pages,
    write,
)


class TestStaged:
    def test_only_delivered_pages_reach_the_pool(self) -> None:
        pool = FlatPool()
        access = page_access(pool)
        assert isinstance(access, StagedPages)
        assert access.geometry == PageGeometry(
            "layer_first", "float32", P, PAGES * P, (2 * P * WIDTH * 4,)
        )
        pages = some_pages(access, 3)
        write(access, [4, 12, 20], pages, [True, False, True])
        assert read(access, [4, 12, 20]) == [pages[0], bytes(len(pages[1])), pages[2]]
        assert pool.get_data_page(4).view(torch.uint8).tolist() == list(pages[0])
        assert not pool.kv_buffer[:, :4].any()

    @pytest.mark.parametrize(
        "error", [ValueError("layer_first"), NotImplementedError(), AssertionError()], ids=repr
    )
    def test_pools_that_refuse_to_tell_addresses_are_copied(self, error: Exception) -> None:
        access = page_access(WithoutAddresses(error))
        assert isinstance(access, StagedPages)
        write(access, [8], some_pages(access, 1))
        assert read(access, [8]) == some_pages(access, 1)

    @pytest.mark.parametrize(
        "error", [AttributeError("data_ptr"), TypeError(), RuntimeError()], ids=repr
    )
    def test_pools_that_break_are_refused(self, error: Exception) -> None:
        with pytest.raises(InvalidPoolError, match="get_page_buffer_meta failed") as caught:
            page_access(WithoutAddresses(error))
        assert caught.value.__cause__ is error

    def test_device_memory_is_copied(self) -> None:
        pool = WithoutAddresses(ValueError())
        pool.get_page_buffer_meta = AddressPool().get_page_buffer_meta  # type: ignore[method-assign]
        assert isinstance(page_access(pool), AddressedPages)
        pool.get_data_page = FlatPool().get_data_page  # type: ignore[method-assign]
        pool.kv_buffer = pool.kv_buffer.to("meta")
        assert isinstance(page_access(pool), StagedPages)

    def test_targets_of_one_call_are_distinct(self) -> None:
        access = page_access(FlatPool())
        for _ in range(3):
            slots = [0, 4, 8]
            targets = access.targets(slots)
            for number, (buffer,) in enumerate(targets):
                buffer[:] = bytes([number]) * len(buffer)
            assert [buffer[0] for (buffer,) in targets] == [0, 1, 2]
            access.deliver(slots, targets, [True, False, True])

    def test_buffers_are_used_again_once_they_are_safe(self) -> None:
        access = page_access(FlatPool())
        slots = [0, 4]
        targets = access.targets(slots)
        (first,), (second,) = targets
        access.deliver(slots, targets, [True, False])
        again = [buffer for (buffer,) in access.targets(slots)]
        # A read into the second may still be going on; nobody else may have that memory.
        for view in again:
            view[:] = b"\x05" * len(view)
        assert first[0] == 5
        assert second[0] == 0

    def test_buffers_kept_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache_storage.pools.staged.SPARE_BYTES", 1)
        access = page_access(FlatPool())
        slots = [0, 4, 8]
        targets = access.targets(slots)
        access.deliver(slots, targets, [True] * 3)
        again = [buffer for (buffer,) in access.targets(slots)]
        for view in again:
            view[:] = b"\x05" * len(view)
        assert sum(buffer[0] == 5 for (buffer,) in targets) == 1

    def test_sources_outlive_the_pages_they_were_made_from(self) -> None:
        pool = FlatPool()
        access = page_access(pool)
        sources = access.sources([0, 4, 8])
        pool.kv_buffer.fill_(1)
        junk = [torch.full((2 * P * WIDTH,), 7.0) for _ in range(50)]
        assert [bytes(buffer) for (buffer,) in sources] == [bytes(2 * P * WIDTH * 4)] * 3
        del junk

    def test_pages_whose_views_are_not_contiguous(self) -> None:
        pool = FlatPool()
        pool.get_data_page = lambda index, flat=True: pool.kv_buffer[:, index : index + P]  # type: ignore[method-assign]
        access = page_access(pool)
        write(access, [4], some_pages(access, 1))
        assert read(access, [4]) == some_pages(access, 1)

    def test_pages_that_do_not_exist_before_they_are_allocated(self) -> None:
        pool = FlatPool()
        give = pool.get_data_page

        def allocated_only(index: int, flat: bool = True) -> torch.Tensor:
            assert index, "page 0 is not allocated"
            return give(index, flat)

        pool.get_data_page = allocated_only  # type: ignore[method-assign]
        access = page_access(pool)
        write(access, [4], some_pages(access, 1))
        assert read(access, [4]) == some_pages(access, 1)

    def test_lengths_that_contradict_each_other_are_refused(self) -> None:
        pool = FlatPool()
        pool.get_dummy_flat_data_page = lambda: torch.zeros(3)  # type: ignore[method-assign]
        with pytest.raises(
            InvalidPoolError,
            match="get_data_page gives 320 bytes where get_dummy_flat_data_page gives 12",
        ):
            page_access(pool)

    def test_pools_that_copy_nothing_are_refused(self) -> None:
        class Refusing(FlatPool):
            def get_dummy_flat_data_page(self) -> torch.Tensor:
                raise NotImplementedError("flat pages are not supported")

        with pytest.raises(
            InvalidPoolError,
            match=r"Refusing can neither lend its pages nor copy them.*flat pages are not",
        ):
            page_access(Refusing())

    def test_threads_get_buffers_of_their_own(self) -> None:
        pool = FlatPool()
        access = page_access(pool)
        wrong: list[int] = []

        def work(slot: int) -> None:
            for turn in range(100):
                page = bytes([(slot + turn) % 256]) * access.geometry.page_bytes
                write(access, [slot], [page])
                if read(access, [slot]) != [page]:
                    wrong.append(slot)

        threads = [threading.Thread(target=work, args=(page * P,)) for page in range(PAGES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_a_pool_on_a_device(self) -> None:
        pool = WithoutAddresses(ValueError())
        pool.kv_buffer = pool.kv_buffer.cuda()
        pool.get_dummy_flat_data_page = lambda: torch.zeros(2 * P * WIDTH, device="cuda")  # type: ignore[method-assign]
        access = page_access(pool)
        write(access, [4, 8], some_pages(access, 2), [True, False])
        assert read(access, [4]) == some_pages(access, 1)
        assert not pool.kv_buffer[:, 8:12].any()
