"""`page_access`: pools that lend, pools that tell addresses, pools that copy, and those that can do none of it."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

import pytest
import torch

from hicache_storage.pools import MHAHostPool, MLAHostPool, PageAccess, page_access
from hicache_storage.pools.adapter import LentPages
from hicache_storage.pools.addressed import AddressedPages
from hicache_storage.pools.staged import StagedPages
from hicache_storage.spec import InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools import HostPoolBase

PAGES, P, WIDTH = 6, 4, 10


class Attributes:
    """What every engine pool has."""

    layout = "page_first"
    dtype = torch.bfloat16
    page_size = P
    size = PAGES * P


class AddressPool(Attributes):
    """SGLang's interface for zero copies: K and V of different lengths, page after page."""

    def __init__(self) -> None:
        self.k_buffer = torch.zeros(self.size, WIDTH, dtype=torch.uint8)
        self.v_buffer = torch.zeros(self.size, WIDTH // 2, dtype=torch.uint8)
        self.asked: list[list[int]] = []

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        slots = indices.tolist()
        self.asked.append(slots)
        pointers = [
            buffer.data_ptr() + slot * buffer.shape[1]
            for slot in slots[:: self.page_size]
            for buffer in (self.k_buffer, self.v_buffer)
        ]
        return pointers, [P * WIDTH, P * WIDTH // 2] * (len(slots) // self.page_size)


class FlatPool(Attributes):
    """SGLang's interface for copies: two layers, so that a page is not contiguous."""

    layout = "layer_first"
    dtype = torch.float32

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(2, self.size, WIDTH, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, index : index + P]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2, P, WIDTH, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[:, index : index + P] = data_page.reshape(2, P, WIDTH)


class WithoutAddresses(FlatPool):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise self.error


def write(access: PageAccess, slots: Sequence[int], pages: Sequence[bytes], delivered: Sequence[bool] | None = None) -> None:
    """Deliver pages as a storage does; those not delivered are written half."""
    delivered = [True] * len(slots) if delivered is None else delivered
    targets = access.targets(slots)
    for buffers, page, complete in zip(targets, pages, delivered, strict=True):
        start = 0
        for buffer in buffers:
            end = len(buffer) if complete else len(buffer) // 2
            buffer[:end] = page[start : start + end]
            start += len(buffer)
    access.deliver(slots, targets, delivered)


def read(access: PageAccess, slots: Sequence[int]) -> list[bytes]:
    return [b"".join(buffers) for buffers in access.sources(slots)]


def some_pages(access: PageAccess, count: int) -> list[bytes]:
    return [bytes((page * 37 + at) % 256 for at in range(access.geometry.page_bytes)) for page in range(1, count + 1)]


class TestLent:
    def test_pools_of_the_sdk_lend_their_memory(self, pool: HostPoolBase) -> None:
        access = page_access(pool)
        assert isinstance(access, LentPages)
        assert access.geometry == pool.geometry
        slots = [pool.page_size * 3, 0]
        write(access, slots, some_pages(access, 2))
        assert read(access, slots) == some_pages(access, 2)
        assert [b"".join(page) for page in pool.page_buffers(slots)] == some_pages(access, 2)

    @pytest.mark.parametrize(
        "view",
        [
            memoryview(bytes(8)),
            memoryview(bytearray(9)),
            memoryview(bytearray(16))[::2],
            memoryview(bytearray(32)).cast("i"),
            memoryview(bytearray(8)).cast("B", (2, 4)),
        ],
        ids=["read-only", "another length", "with holes", "not bytes", "two-dimensional"],
    )
    def test_unusable_views_are_refused(self, view: memoryview) -> None:
        class Lender:
            geometry = PageGeometry("page_first", "uint8", 1, 1, (8,))

            def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
                return [[view] for _ in first_slots]

        with pytest.raises(InvalidPoolError, match=r"Lender\.page_buffers must give writable, contiguous byte views"):
            page_access(Lender())

    def test_the_last_page_is_looked_at_too(self) -> None:
        memory = memoryview(bytearray(31))

        class Short:
            geometry = PageGeometry("page_first", "uint8", 1, 4, (8,))

            def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
                return [[memory[slot * 8 : slot * 8 + 8]] for slot in first_slots]

        with pytest.raises(InvalidPoolError, match="page_buffers"):
            page_access(Short())

    @pytest.mark.parametrize(
        ("geometry", "message"),
        [
            (PageGeometry("page_first", "uint8", 4, 6, (8,)), "multiple of its page_size, got 6 and 4"),
            (PageGeometry("page_first", "uint8", 0, 0, (8,)), "multiple of its page_size"),
            (PageGeometry("page_first", "uint8", 1, 4, ()), "at least 1 byte each"),
            (PageGeometry("page_first", "uint8", 1, 4, (8, 0)), "at least 1 byte each"),
            ("page_first", "geometry must be a PageGeometry"),
        ],
    )
    def test_impossible_geometries_are_refused(self, geometry: object, message: str) -> None:
        class Lender:
            def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
                return []

        Lender.geometry = geometry  # type: ignore[attr-defined]
        with pytest.raises(InvalidPoolError, match=message):
            page_access(Lender())


class TestAddressed:
    def test_the_pools_own_memory_is_lent(self) -> None:
        pool = AddressPool()
        access = page_access(pool)
        assert isinstance(access, AddressedPages)
        assert access.geometry == PageGeometry("page_first", "bfloat16", P, PAGES * P, (40, 20))
        slots = [8, 20, 0]
        pages = some_pages(access, 3)
        write(access, slots, pages)
        assert read(access, slots) == pages
        assert bytes(pool.k_buffer[8:12].flatten().tolist()) == pages[0][:40]
        assert bytes(pool.v_buffer[20:24].flatten().tolist()) == pages[1][40:]
        assert not pool.k_buffer[4:8].any()
        assert not pool.k_buffer[12:20].any()

    def test_one_question_for_a_batch(self) -> None:
        pool = AddressPool()
        access = page_access(pool)
        pool.asked.clear()
        access.sources([4, 12])
        assert pool.asked == [[4, 5, 6, 7, 12, 13, 14, 15]]
        assert access.targets([]) == []
        assert len(pool.asked) == 1

    def test_a_pool_of_one_page(self) -> None:
        pool = AddressPool()
        pool.size = P
        access = page_access(pool)
        write(access, [0], some_pages(access, 1))
        assert read(access, [0]) == some_pages(access, 1)

    @pytest.mark.parametrize("place", [0, 2], ids=["lower", "higher"])
    def test_memory_that_has_moved_is_found(self, place: int) -> None:
        pool = AddressPool()
        arena = torch.zeros(3, pool.size * WIDTH * 2, dtype=torch.uint8)

        def lie_in(row: torch.Tensor) -> None:
            k, v = row.split(pool.size * WIDTH)
            pool.k_buffer, pool.v_buffer = k.view(-1, WIDTH), v[: len(v) // 2].view(-1, WIDTH // 2)

        lie_in(arena[1])
        access = page_access(pool)
        arena[place] = 9
        lie_in(arena[place])
        assert read(access, [4, 20]) == [b"\x09" * 60] * 2

    def test_the_same_layout_and_components_are_the_same_geometry(self) -> None:
        own = MLAHostPool(size=8, page_size=4, layer_num=2, kv_cache_dim=3, dtype=torch.bfloat16)

        class Foreign(Attributes):
            size = 8

            def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
                return own.get_page_buffer_meta(indices)

        assert page_access(Foreign()).geometry == own.geometry

    def test_a_page_spread_over_ranks_counts_its_logical_slots(self) -> None:
        pool = AddressPool()
        pool.logical_page_size, pool.logical_size = 2 * P, 2 * pool.size  # type: ignore[attr-defined]
        tell = pool.get_page_buffer_meta

        def tell_logical(indices: torch.Tensor) -> tuple[list[int], list[int]]:
            first = indices[:: 2 * P] // 2
            return tell((first.unsqueeze(1) + torch.arange(P)).view(-1))

        pool.get_page_buffer_meta = tell_logical  # type: ignore[method-assign]
        access = page_access(pool)
        assert (access.geometry.page_size, access.geometry.size) == (2 * P, 2 * PAGES * P)
        write(access, [2 * P], some_pages(access, 1))
        assert bytes(pool.k_buffer[P : 2 * P].flatten().tolist()) == some_pages(access, 1)[0][:40]

    def test_names_of_types_and_layouts(self) -> None:
        class Layout(str, Enum):  # noqa: UP042 - SGLang's members print as their class
            PAGE_FIRST = "page_first"

        pool = AddressPool()
        pool.layout, pool.dtype = Layout.PAGE_FIRST, "float16"  # type: ignore[assignment]
        assert (page_access(pool).geometry.layout, page_access(pool).geometry.dtype) == ("page_first", "float16")
        pool.storage_format_tag = "token-major"  # type: ignore[attr-defined]
        assert page_access(pool).geometry.layout == "page_first+token-major"
        pool.temporal_dtype, pool.conv_dtype = torch.float32, torch.bfloat16  # type: ignore[attr-defined]
        assert page_access(pool).geometry.dtype == "float32+bfloat16"

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (lambda ptrs, sizes: (ptrs, [0] * len(sizes)), "at least 1 byte"),
            (lambda ptrs, sizes: (ptrs, [-1] * len(sizes)), "at least 1 byte"),
            (lambda ptrs, sizes: (ptrs[:-1], sizes[:-1]), "as many addresses as lengths"),
            (lambda ptrs, sizes: (ptrs, sizes[:-1]), "as many addresses as lengths"),
            (lambda ptrs, sizes: (ptrs, [*sizes[:-1], 19]), "the same lengths for each page"),
            (lambda ptrs, sizes: ([ptrs[0]] * len(ptrs), sizes), "overlapping"),
            (lambda ptrs, sizes: ptrs, "get_page_buffer_meta failed"),
            (lambda ptrs, sizes: (ptrs, None), "at least 1 byte"),
        ],
    )
    def test_contradictions_are_refused(self, answer: object, message: str) -> None:
        pool = AddressPool()
        tell = pool.get_page_buffer_meta
        pool.get_page_buffer_meta = lambda indices: answer(*tell(indices))  # type: ignore[method-assign, operator]
        with pytest.raises(InvalidPoolError, match=message):
            page_access(pool)

    def test_a_pool_that_changes_its_mind_is_found_out(self) -> None:
        pool = AddressPool()
        access = page_access(pool)
        pool.get_page_buffer_meta = lambda indices: ([pool.k_buffer.data_ptr()], [999])  # type: ignore[method-assign]
        with pytest.raises(InvalidPoolError, match="when it was registered"):
            access.targets([0])

    def test_addresses_outside_host_memory_are_refused(self) -> None:
        pool = AddressPool()
        pool.get_page_buffer_meta = lambda indices: ([0x1000 * (slot + 1) for slot in indices[::P]], [8] * (len(indices) // P))  # type: ignore[method-assign]
        with pytest.raises(InvalidPoolError, match=r"not host memory, and it lacks the flat pages \(get_data_page, get_dummy"):
            page_access(pool)

    @pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda")])
    def test_memory_said_to_be_a_devices_is_refused(self, device: object) -> None:
        pool = AddressPool()
        pool.device = device  # type: ignore[attr-defined]
        with pytest.raises(InvalidPoolError, match="not host memory"):
            page_access(pool)


class TestStaged:
    def test_only_delivered_pages_reach_the_pool(self) -> None:
        pool = FlatPool()
        access = page_access(pool)
        assert isinstance(access, StagedPages)
        assert access.geometry == PageGeometry("layer_first", "float32", P, PAGES * P, (2 * P * WIDTH * 4,))
        pages = some_pages(access, 3)
        write(access, [4, 12, 20], pages, [True, False, True])
        assert read(access, [4, 12, 20]) == [pages[0], bytes(len(pages[1])), pages[2]]
        assert pool.get_data_page(4).view(torch.uint8).tolist() == list(pages[0])
        assert not pool.kv_buffer[:, :4].any()

    @pytest.mark.parametrize("error", [ValueError("layer_first"), NotImplementedError(), AssertionError()], ids=repr)
    def test_pools_that_refuse_to_tell_addresses_are_copied(self, error: Exception) -> None:
        access = page_access(WithoutAddresses(error))
        assert isinstance(access, StagedPages)
        write(access, [8], some_pages(access, 1))
        assert read(access, [8]) == some_pages(access, 1)

    @pytest.mark.parametrize("error", [AttributeError("data_ptr"), TypeError(), RuntimeError()], ids=repr)
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
        with pytest.raises(InvalidPoolError, match="get_data_page gives 320 bytes where get_dummy_flat_data_page gives 12"):
            page_access(pool)

    def test_pools_that_copy_nothing_are_refused(self) -> None:
        class Refusing(FlatPool):
            def get_dummy_flat_data_page(self) -> torch.Tensor:
                raise NotImplementedError("flat pages are not supported")

        with pytest.raises(InvalidPoolError, match=r"Refusing can neither lend its pages nor copy them.*flat pages are not"):
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


class TestRefused:
    @pytest.mark.parametrize("answer", [None, ([], []), (None, None)], ids=repr)
    def test_logical_anchors_without_addresses(self, answer: object) -> None:
        pool = WithoutAddresses(ValueError())
        pool.get_page_buffer_meta = lambda indices: answer  # type: ignore[method-assign]
        with pytest.raises(InvalidPoolError, match="has no memory of its own"):
            page_access(pool)

    def test_logical_anchors_without_a_buffer(self) -> None:
        pool = FlatPool()
        pool.kv_buffer = None  # type: ignore[assignment]
        with pytest.raises(InvalidPoolError, match=r"FlatPool has no memory of its own \(kv_buffer is None\)"):
            page_access(pool)

    def test_missing_methods_are_named(self) -> None:
        class Half(Attributes):
            def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
                raise AssertionError

        with pytest.raises(
            InvalidPoolError, match=r"Half cannot be served.*lacks get_dummy_flat_data_page, set_from_flat_data_page$"
        ):
            page_access(Half())
        with pytest.raises(InvalidPoolError, match="lacks get_data_page, get_dummy_flat_data_page, set_from_flat_data_page"):
            page_access(None)

    @pytest.mark.parametrize("name", ["layout", "dtype", "page_size", "size"])
    def test_missing_attributes_are_named(self, name: str) -> None:
        class Bare:
            def get_page_buffer_meta(self, indices: torch.Tensor) -> None: ...

        for other in {"layout", "dtype", "page_size", "size"} - {name}:
            setattr(Bare, other, getattr(Attributes, other))
        with pytest.raises(InvalidPoolError, match=f"lacks the attributes {name}$"):
            page_access(Bare())

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("layout", "", "layout must be a text"),
            ("layout", 3, "layout must be a text"),
            ("dtype", None, "dtype must be a torch.dtype or its name"),
            ("dtype", object(), "dtype must be a torch.dtype or its name"),
            ("page_size", "4", "must be integers"),
            ("size", 4.5, "must be integers"),
            ("size", 25, "must be a positive multiple of its page_size, got 25 and 4"),
            ("size", 2, "must be a positive multiple of its page_size"),
            ("page_size", -4, "must be a positive multiple of its page_size"),
        ],
    )
    def test_unusable_attributes_are_named(self, name: str, value: object, message: str) -> None:
        for pool in (AddressPool(), FlatPool()):
            setattr(pool, name, value)
            with pytest.raises(InvalidPoolError, match=message):
                page_access(pool)


def test_copied_and_lent_pages_of_one_layout_do_not_meet() -> None:
    own = MHAHostPool(size=8, page_size=4, layer_num=2, head_num=1, head_dim=2, dtype=torch.float32)

    class Copied(Attributes):
        dtype, size = torch.float32, 8
        get_data_page = staticmethod(own.get_data_page)
        get_dummy_flat_data_page = staticmethod(own.get_dummy_flat_data_page)
        set_from_flat_data_page = staticmethod(own.set_from_flat_data_page)

    assert page_access(Copied()).geometry.page_bytes == own.geometry.page_bytes
    assert page_access(Copied()).geometry != own.geometry
