"""Protocol of an engine's own host pools, under SGLang's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.spec import InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

ATTRIBUTES = ("layout", "dtype", "page_size", "size")
FLAT_METHODS = ("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page")


class EnginePool(Protocol):
    """Methods of an engine's host pool; one that has not all of them can be served too."""

    def get_page_buffer_meta(
        self, indices: torch.Tensor
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """Addresses and lengths of the components of pages, in bytes.

        Page after page of those in `indices`.
        """
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page that begins at slot `index`."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A tensor of a flat page's length, element type and device."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy `data_page` into the page that begins at slot `index`."""
        ...


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
    check_sizes(page_size, size, where)
    # A pool whose bytes follow a format of their own says so in a tag beside the layout.
    tag = getattr(pool, "storage_format_tag", None)
    # str.__str__: an enum member that is a str prints as its class.
    text = str.__str__(layout)
    return PageGeometry(
        f"{text}+{tag}" if tag else text, _element_type(pool, where), page_size, size, ()
    )


def check_sizes(page_size: int, size: int, where: str) -> None:
    """Refuse a pool that is not a whole number of pages.

    Raises:
        InvalidPoolError: the message begins with `where`.
    """
    if page_size < 1 or size < page_size or size % page_size:
        raise InvalidPoolError(
            f"{where}.size must be a positive multiple of its page_size, got {size} and {page_size}"
        )


def check_components(component_bytes: Sequence[int], where: str) -> None:
    """Refuse a page without bytes, or with a component without.

    Raises:
        InvalidPoolError: the message begins with `where`.
    """
    if not component_bytes or min(component_bytes) < 1:
        raise InvalidPoolError(
            f"{where}: a page's components must have at least 1 byte each, got {component_bytes}"
        )


def end_pages(geometry: PageGeometry) -> list[int]:
    """First slots of a pool's first and last page."""
    return sorted({0, geometry.size - geometry.page_size})


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
