"""Pages of an engine's own host pools, under SGLang's names: lent by address, or copied."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from hicache_storage.pools.access import (
    PageAccess,
    StagedAccess,
    check_components,
    check_size,
    end_pages,
)
from hicache_storage.pools.memory import byte_view, host_tensor, in_host_memory
from hicache_storage.pools.shards import layout_rows
from hicache_storage.spec import InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTRIBUTES = ("layout", "dtype", "page_size", "size")


class NoAddressesError(Exception):
    """The pool has pages but no addresses in host memory for them; they can still be copied."""


class AddressedPages(PageAccess):
    """Lends an engine's memory by the addresses that `get_page_buffer_meta` tells.

    The method is called once for each batch, with the slots of its pages (int64). It returns the
    addresses and the lengths in bytes of their components, page after page.

    The pool is kept alive; that its memory stays where it says is the engine's promise for the
    length of a call.

    Raises:
        NoAddressesError: the pool has none to tell, or they are in device memory.
        InvalidPoolError: it has no memory of its own, or its answers contradict each other.
    """

    def __init__(self, pool: Any, geometry: PageGeometry, where: str) -> None:
        self._pool = pool
        self._where = where
        self._offsets = torch.arange(geometry.page_size)
        slots = end_pages(geometry)
        addresses, lengths = self._first_answer(slots)
        components = lengths[: len(lengths) // len(slots)]
        self.geometry = replace(geometry, component_bytes=tuple(components))
        check_components(self.geometry.component_bytes, where)
        if len(addresses) != len(lengths) or lengths != components * len(slots):
            raise InvalidPoolError(
                f"{where}.get_page_buffer_meta must tell as many addresses as lengths, and the "
                f"same lengths for each page; for {len(slots)} pages it returned {len(addresses)} "
                f"addresses and the lengths {lengths}"
            )
        ranges = sorted(zip(addresses, lengths, strict=True))
        if any(start + length > after for (start, length), (after, _) in pairwise(ranges)):
            raise InvalidPoolError(
                f"{where}.get_page_buffer_meta tells overlapping components for different pages"
            )
        # Both are asked: not every pool tells where it lies, and device addresses look like any
        # others.
        if is_on_device(pool) or not in_host_memory(ranges):
            raise NoAddressesError("the addresses of its pages are not host memory")
        self._span = _span_over(addresses, max(components))
        self.geometry = _with_heads(self.geometry, pool, addresses[: len(components)])

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        if not first_slots:
            return []
        components = self.geometry.component_bytes
        expected = components * len(first_slots)
        # Asked in every call: an engine's pool that compacts itself may move its pages between
        # calls.
        addresses, lengths = self._pool.get_page_buffer_meta(self._indices(first_slots)) or ((), ())
        if len(addresses) != len(expected) or tuple(lengths) != expected:
            raise InvalidPoolError(
                f"{self._where}.get_page_buffer_meta returned {components} bytes for a page when "
                f"it was registered, and now {len(addresses)} components for {len(first_slots)} "
                "pages"
            )
        # A local reference: another thread may replace the attribute between the check and the
        # slicing.
        span = self._span
        if min(addresses) < span.start or max(addresses) > span.last:
            self._span = span = _span_over(addresses, max(components))
        start, _, view = span
        views = [
            view[at - start : at - start + length]
            for at, length in zip(addresses, lengths, strict=True)
        ]
        return [views[at : at + len(components)] for at in range(0, len(views), len(components))]

    def _indices(self, first_slots: Sequence[int]) -> torch.Tensor:
        return (self._offsets.new_tensor(first_slots).unsqueeze(1) + self._offsets).view(-1)

    def _first_answer(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        try:
            answer = self._pool.get_page_buffer_meta(self._indices(slots))
            addresses, lengths = (list[int](part or ()) for part in answer or ((), ()))
        except (AssertionError, NotImplementedError, ValueError) as error:
            # SGLang's pools answer so where a layout, or a kind of state, has no addresses to tell.
            raise NoAddressesError(
                f"get_page_buffer_meta says {str(error) or repr(error)!r}"
            ) from error
        except Exception as error:
            raise InvalidPoolError(
                f"{self._where}.get_page_buffer_meta failed: {error!r}"
            ) from error
        if not addresses and not lengths:
            raise InvalidPoolError(
                f"{self._where} has no memory of its own (get_page_buffer_meta tells nothing): "
                "its pages are bookkeeping for other pools. Register those, not this one"
            )
        return addresses, lengths


class StagedPages(StagedAccess):
    """Moves flat pages through buffers of its own; for pools of any layout on any device.

    A page has one component: the bytes of its flat tensor. `get_dummy_flat_data_page` returns such
    a tensor, `get_data_page(slot, flat=True)` the page that begins at a slot, and
    `set_from_flat_data_page(slot, tensor)` copies one into it.

    Raises:
        InvalidPoolError: the pool cannot make flat pages either, or their lengths contradict each
            other.
    """

    SPARE_BYTES: ClassVar[int] = 256 << 20

    def __init__(self, pool: Any, geometry: PageGeometry, where: str) -> None:
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


def describe(pool: object, where: str) -> PageGeometry:
    """Geometry of an engine's pool as far as its attributes tell: without the components.

    Raises:
        InvalidPoolError: an attribute is missing or has an unusable value.
    """
    missing = [name for name in ATTRIBUTES if not hasattr(pool, name)]
    if missing:
        raise InvalidPoolError(
            f"{where} cannot be served: it lacks the attributes {', '.join(missing)}"
        )
    layout = getattr(pool, "layout", None)
    # Where context parallelism spreads a page over ranks, keys and slots count the whole page.
    page_size = getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", None)
    size = getattr(pool, "logical_size", None) or getattr(pool, "size", None)
    if not isinstance(layout, str) or not layout:
        raise InvalidPoolError(f"{where}.layout must be a text, got {layout!r}")
    if not isinstance(page_size, int) or not isinstance(size, int):
        raise InvalidPoolError(
            f"{where}.page_size and .size must be integers, got {page_size!r} and {size!r}"
        )
    check_size(size, page_size, f"{where}.")
    # A pool whose bytes follow a format of their own says so in a tag beside the layout.
    tag = getattr(pool, "storage_format_tag", None)
    # str.__str__: an enum member that is a str prints as its class.
    text = str.__str__(layout)
    return PageGeometry(
        f"{text}+{tag}" if tag else text, _element_type(pool, where), page_size, size, ()
    )


def is_on_device(pool: object) -> bool:
    """Return True if the pool declares device memory."""
    # The buffer first: its bytes are there, whatever the pool's own attribute says.
    buffer = getattr(pool, "kv_buffer", None)
    device = getattr(buffer, "device", None) or getattr(pool, "device", None) or "cpu"
    return str(device).partition(":")[0] != "cpu"


def _element_type(pool: object, where: str) -> str:
    """Return the element types that the pool's bytes are made of.

    SGLang's Mamba and indexer pools have more than `dtype`.
    """
    temporal, conv = getattr(pool, "temporal_dtype", None), getattr(pool, "conv_dtype", None)
    if temporal is not None and conv is not None:
        return f"{_dtype_name(temporal, where)}+{_dtype_name(conv, where)}"
    return _dtype_name(getattr(pool, "indexer_dtype", None) or getattr(pool, "dtype", None), where)


def _dtype_name(dtype: object, where: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if dtype is None or not name.isidentifier():
        raise InvalidPoolError(f"{where}.dtype must be a torch.dtype or its name, got {dtype!r}")
    return name


def _with_heads(geometry: PageGeometry, pool: object, addresses: Sequence[int]) -> PageGeometry:
    """Add the KV heads, where the pool's attributes account for every byte of a page.

    Args:
        geometry: of the pool.
        pool: an engine's.
        addresses: of the components of its first page.
    """
    heads, layers, head_dim, v_head_dim = (
        getattr(pool, name, None) for name in ("head_num", "layer_num", "head_dim", "v_head_dim")
    )
    dtype = getattr(pool, "dtype", None)
    if not (
        isinstance(heads, int)
        and isinstance(layers, int)
        and isinstance(head_dim, int)
        and isinstance(dtype, torch.dtype)
    ):
        return geometry
    page_size = getattr(pool, "page_size", None)
    rows = layout_rows(geometry.layout, geometry.page_size, layers)
    bytes_of_a_head = rows * dtype.itemsize
    if geometry.layout == "page_head":
        bytes_of_a_head *= geometry.page_size * layers
    lengths = {
        heads * width * bytes_of_a_head
        for width in (head_dim, v_head_dim)
        if isinstance(width, int)
    }
    if not rows or page_size != geometry.page_size or set(geometry.component_bytes) != lengths:
        return geometry
    if not _is_split_alike(pool, heads, geometry, addresses):
        return geometry
    return replace(geometry, head_num=heads, head_rows=(rows,) * len(geometry.component_bytes))


def _is_split_alike(
    pool: object, heads: int, geometry: PageGeometry, addresses: Sequence[int]
) -> bool:
    """Return False if the engine itself divides a page into heads in another way."""
    split = getattr(pool, "get_split_heads_page_buffer_meta", None)
    if geometry.layout != "page_head" or split is None:
        return True
    try:
        found, _ = split(torch.arange(geometry.page_size), heads)
    except (AssertionError, NotImplementedError):
        return False
    return list(found) == [
        address + head * length // heads
        for head in range(heads)
        for address, length in zip(addresses, geometry.component_bytes, strict=True)
    ]


class _Span(NamedTuple):
    """One view from the lowest to the highest address in use.

    Slicing it is twice as fast as a view for each address.
    """

    start: int
    last: int
    view: memoryview


def _span_over(addresses: Sequence[int], size: int) -> _Span:
    start, last = min(addresses), max(addresses)
    # Memory between the slices that are used need not exist.
    memory = (ctypes.c_ubyte * (last - start + size)).from_address(start)
    return _Span(start, last, memoryview(memory).cast("B"))
