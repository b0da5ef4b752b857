"""Pages of an engine's pool that only copies them in and out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from hicache_storage.pools.access import StagedAccess
from hicache_storage.pools.engine import check_components
from hicache_storage.pools.memory import byte_view, host_tensor
from hicache_storage.spec import InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools.engine import EnginePool


class StagedPages(StagedAccess):
    """Moves flat pages through buffers of its own; for pools of any layout on any device.

    A page has one component: the bytes of its flat tensor.

    Raises:
        InvalidPoolError: the pool cannot make flat pages either, or their lengths contradict each
            other.
    """

    SPARE_BYTES: ClassVar[int] = 256 << 20

    def __init__(self, pool: EnginePool, geometry: PageGeometry, where: str) -> None:
        self._pool = pool
        self._where = where
        try:
            model = pool.get_dummy_flat_data_page()
            self._dtype = model.dtype
            self._device = model.device
            components = (model.numel() * model.element_size(),)
            check_components(components, where)
            super().__init__(replace(geometry, component_bytes=components))
            # One page is copied as a trial: a pool that has the methods and cannot serve is refused
            # here.
            self._read_first_page()
        except InvalidPoolError:
            raise
        except Exception as error:
            raise InvalidPoolError(
                f"{where} can neither lend its pages nor copy them: {error!r}"
            ) from error

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [[self._page_bytes(slot)] for slot in first_slots]

    def _new_buffers(self) -> list[memoryview]:
        return [byte_view(host_tensor((self.geometry.page_bytes,), torch.uint8, pin_memory=False))]

    def _copy_in(self, first_slots: Sequence[int], pages: Sequence[list[memoryview]]) -> None:
        for slot, (buffer,) in zip(first_slots, pages, strict=True):
            page = torch.frombuffer(buffer, dtype=torch.uint8).view(self._dtype)
            self._pool.set_from_flat_data_page(slot, page.to(self._device))
        if self._device.type != "cpu":
            # The caller may hand the pages to another stream as soon as this returns.
            torch.accelerator.current_stream(self._device).synchronize()

    def _page_bytes(self, slot: int) -> memoryview:
        view = byte_view(self._pool.get_data_page(slot, flat=True).detach().to("cpu").contiguous())
        if len(view) != self.geometry.page_bytes:
            raise InvalidPoolError(
                f"{self._where}.get_data_page gives {len(view)} bytes where "
                f"get_dummy_flat_data_page gives {self.geometry.page_bytes}"
            )
        return view

    def _read_first_page(self) -> None:
        try:
            self._page_bytes(0)
        except AssertionError:
            # SGLang's compacting pools have no page 0 until one is allocated.
            return
