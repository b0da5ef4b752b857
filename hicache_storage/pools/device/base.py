"""Base class of the SDK's device pools: slots, and the check of their host pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch

from hicache_storage.pools.device.pages import DevicePages
from hicache_storage.pools.host.slots import SlotAllocator
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools.host.base import HostPoolBase


class DevicePoolBase(DevicePages):
    """A pool in device memory whose slots are handed out in pages.

    To be used through one of its subclasses.

    A page is `page_size` consecutive slots from a multiple of `page_size` on. All slots can be
    handed out; an engine that wants a padding page counts it into the size. `alloc` and `free` are
    thread-safe. They know nothing of copies: a page that was freed may be handed out while a copy
    reads it, so that code which overwrites a page first calls `before_overwrite` of the transfer
    engine.
    """

    HOST_POOL: ClassVar[str]
    """Name of the host pool that takes these pages."""
    FIELDS: ClassVar[tuple[str, ...]]
    """Attributes in which that host pool has to agree."""

    device: torch.device

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        page_size: int,
        device: torch.device,
        *,
        rows_per_page: int | None = None,
    ) -> None:
        super().__init__(layers, page_size, rows_per_page=rows_per_page)
        self.device = device
        self._slots = SlotAllocator(self.size, page_size)

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take `count` slots, a positive multiple of the page size: int64 on the CPU.

        None if fewer are free.

        Raises:
            SlotError: `count` is not a positive multiple of the page size.
        """
        return self._slots.alloc(count)

    def free(self, indices: torch.Tensor) -> int:
        """Give back whole pages of slots; returns the number of slots.

        Raises:
            SlotError: a slot is out of range, not in use, given back twice, or without its page;
                nothing was freed.
        """
        return self._slots.free(indices)

    def available_size(self) -> int:
        """Number of free slots."""
        return self._slots.available_size()

    def clear(self) -> None:
        """Take back all slots. Bytes stay as they are."""
        self._slots.clear()

    def check_host_pool(self, pool: HostPoolBase) -> None:
        """Refuse a host pool that cannot take these pages.

        Raises:
            InvalidPoolError: it is of another kind, or differs in a field; the message names it.
        """
        mine = type(self).__name__
        if type(pool).__name__ != self.HOST_POOL:
            raise InvalidPoolError(
                f"{mine} is backed up by {self.HOST_POOL}, not by {type(pool).__name__}"
            )
        for field in ("page_size", "layer_num", *self.FIELDS):
            here, there = getattr(self, field), getattr(pool, field)
            if here != there:
                raise InvalidPoolError(
                    f"{field} is {there} in the host pool and {here} in {mine}; make them equal"
                )


def device_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeroed device memory.

    Unwritten slots must not be NaN to a kernel that reads whole pages.

    The zeros are there when this returns.

    Raises:
        InvalidPoolError: there is not that much memory.
    """
    try:
        memory = torch.zeros(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        size = math.prod(shape) * dtype.itemsize
        raise InvalidPoolError(
            f"cannot allocate {size} bytes on {device} ({error}); pass a smaller size"
        ) from error
    if device.type == "cuda":
        # The zeros come on the current stream, which no stream of a model or a copy waits for.
        torch.cuda.current_stream(device).synchronize()
    return memory
