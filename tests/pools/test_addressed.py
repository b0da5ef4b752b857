"""`page_access` of pools that tell addresses."""

from __future__ import annotations

from enum import Enum

import pytest
import torch

from hicache_storage.pools import MLAGeometry, MLAHostPool, page_access
from hicache_storage.pools.addressed import AddressedPages
from hicache_storage.spec import InvalidPoolError, PageGeometry
from tests.pools.foreign import PAGES, WIDTH, AddressPool, Attributes, P, read, some_pages, write


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
        pool.operations.clear()
        access.sources([4, 12])
        assert pool.operations == [[4, 5, 6, 7, 12, 13, 14, 15]]
        assert access.targets([]) == []
        assert len(pool.operations) == 1

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
        own = MLAHostPool(
            MLAGeometry(layers=range(2), kv_lora_rank=3, dtype=torch.bfloat16), size=8, page_size=4
        )

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
        assert (page_access(pool).geometry.layout, page_access(pool).geometry.dtype) == (
            "page_first",
            "float16",
        )
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
        pool.get_page_buffer_meta = lambda indices: (
            [0x1000 * (slot + 1) for slot in indices[::P]],
            [8] * (len(indices) // P),
        )  # type: ignore[method-assign]
        with pytest.raises(
            InvalidPoolError,
            match=r"not host memory, and it lacks the flat pages \(get_data_page, get_dummy",
        ):
            page_access(pool)

    @pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda")])
    def test_memory_said_to_be_a_devices_is_refused(self, device: object) -> None:
        pool = AddressPool()
        pool.device = device  # type: ignore[attr-defined]
        with pytest.raises(InvalidPoolError, match="not host memory"):
            page_access(pool)
