"""`page_access`: pools that lend, those that can do nothing, and what their pages are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hicache_storage.pools import AttentionGeometry, MHAHostPool, page_access
from hicache_storage.pools.adapter import LentPages
from hicache_storage.spec import InvalidPoolError, PageGeometry
from tests.pools.foreign import (
    AddressPool,
    Attributes,
    FlatPool,
    WithoutAddresses,
    read,
    some_pages,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools import HostPoolBase


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

        with pytest.raises(
            InvalidPoolError,
            match=r"Lender\.page_buffers must give writable, contiguous byte views",
        ):
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
            (
                PageGeometry("page_first", "uint8", 4, 6, (8,)),
                "multiple of its page_size, got 6 and 4",
            ),
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
        with pytest.raises(
            InvalidPoolError, match=r"FlatPool has no memory of its own \(kv_buffer is None\)"
        ):
            page_access(pool)

    def test_missing_methods_are_named(self) -> None:
        class Half(Attributes):
            def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
                raise AssertionError

        with pytest.raises(
            InvalidPoolError,
            match=r"Half cannot be served.*lacks get_dummy_flat_data_page, set_from_flat_data_page$",
        ):
            page_access(Half())
        with pytest.raises(
            InvalidPoolError,
            match="lacks get_data_page, get_dummy_flat_data_page, set_from_flat_data_page",
        ):
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
    own = MHAHostPool(
        AttentionGeometry(layers=range(2), head_num=1, head_dim=2, dtype=torch.float32),
        size=8,
        page_size=4,
    )

    class Copied(Attributes):
        dtype, size = torch.float32, 8
        get_data_page = staticmethod(own.get_data_page)
        get_dummy_flat_data_page = staticmethod(own.get_dummy_flat_data_page)
        set_from_flat_data_page = staticmethod(own.set_from_flat_data_page)

    assert page_access(Copied()).geometry.page_bytes == own.geometry.page_bytes
    assert page_access(Copied()).geometry != own.geometry
