"""Plans: how the pages of a pair of pools are copied, from lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from hicache_storage.spec import InvalidPoolError, InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.pools import DevicePages, PagedHostPool

Way = Literal["kernel", "dma"]
WAYS: Final = ("kernel", "dma")
MIN_DMA_BYTES: Final = 512 << 10
"""Pieces from this length on cross the bus by DMA at its full speed."""
LOAD_GROUPS: Final = 8
"""Groups of layers of a load by DMA, at least: kernels of a layer wait for the whole group."""
MAX_PART_WORDS: Final = 1 << 32
_MAX_AXES: Final = 2


class How(StrEnum):
    """One direction of a plan."""

    KERNEL = "rows by a kernel"
    """The kernel reads or writes page-locked host memory."""
    STAGED = "DMA and a kernel"
    """DMA between the host and a staging buffer; the kernel gathers or scatters on the device."""
    DIRECT = "DMA"
    """DMA between the host and the pages."""


class Geometry(NamedTuple):
    """One layer's share of a page, seen from a `to` and a `from` side; distances in bytes.

    It is `outer * inner` pieces of `width` bytes.
    """

    pitches: tuple[int, int]
    outer: tuple[int, int, int]
    """How many pieces, and their distance on either side."""
    inner: tuple[int, int, int]
    width: int

    @property
    def bytes(self) -> int:
        return self.outer[0] * self.inner[0] * self.width


def geometry(to: torch.Tensor, origin: torch.Tensor) -> Geometry:
    """The geometry of two views (pages, rows per page, ...) of one shape and element type.

    Raises:
        InvalidPoolError: pieces lie apart along more than two axes.
    """
    size = to.element_size()
    axes = [
        (count, to_step * size, origin_step * size)
        for count, to_step, origin_step in zip(
            to.shape[1:], to.stride()[1:], origin.stride()[1:], strict=True
        )
        if count != 1
    ]
    # From the bytes of an element outwards: an axis that continues the one before makes that longer.
    pieces = [(size, 1, 1)]
    for axis in sorted(axes, key=lambda axis: max(axis[1:])):
        length, *steps = pieces[-1]
        if [*axis[1:]] == [length * step for step in steps]:
            pieces[-1] = (length * axis[0], steps[0], steps[1])
        else:
            pieces.append(axis)
    (width, _, _), *joined = pieces
    if len(joined) > _MAX_AXES:
        raise InvalidPoolError(
            f"pages have gaps along {len(joined)} axes, and copies know {_MAX_AXES}: shape "
            f"{tuple(to.shape[1:])}, strides {to.stride()[1:]} and {origin.stride()[1:]}"
        )
    inner, outer = [*joined, *[(1, 0, 0)] * (_MAX_AXES - len(joined))]
    return Geometry((to.stride(0) * size, origin.stride(0) * size), outer, inner, width)


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts of each layer that have the same lengths, and how they are copied."""

    device: list[torch.Tensor]
    """Layer by layer a view (pages, rows per page, ...) for each part."""
    host: list[torch.Tensor]
    parts: int
    """In each layer."""
    layer_bytes: int
    """Of a page, in one part."""
    out: How
    into: How

    @property
    def layer_num(self) -> int:
        return len(self.host) // self.parts

    def __str__(self) -> str:
        return (
            f"{self.parts} part(s) of {self.layer_num} layers: write-back {self.out}, load "
            f"{self.into} ({self.layer_bytes} bytes a layer of a page)"
        )


def make_plan(device: DevicePages, host: PagedHostPool, way: Way | None) -> list[PartGroup]:
    """Choose how each part is copied.

    Args:
        device, host: of the same layers and rows.
        way: forces the kernel, or DMA wherever pieces are contiguous; None chooses.

    Raises:
        InvalidTransferError: `way` is unknown.
        InvalidPoolError: pages have gaps that copies do not know.
    """
    if way is not None and way not in WAYS:
        raise InvalidTransferError(f"way must be None or one of {', '.join(WAYS)}; got {way!r}")
    layers = [
        list(zip(device.layer(layer), host.layer(layer), strict=True))
        for layer in range(device.layer_num)
    ]
    alike = dict[tuple[Geometry, tuple[int, ...]], list[int]]()
    for part, (on_device, on_host) in enumerate(layers[0]):
        steps = tuple(layer[part][1].data_ptr() - on_host.data_ptr() for layer in layers)
        alike.setdefault((geometry(on_host, on_device), steps), []).append(part)
    return [
        PartGroup(
            [layer[part][0] for layer in layers for part in parts],
            [layer[part][1] for layer in layers for part in parts],
            len(parts),
            shape.bytes,
            *_choose(shape, steps, way),
        )
        for (shape, steps), parts in alike.items()
    ]


def _choose(shape: Geometry, steps: Sequence[int], way: Way | None) -> tuple[How, How]:
    """Return how pages go out and come in.

    Args:
        shape: of the host and the device.
        steps: from the host memory of the first layer to that of each.
    """
    # A page of one layer is one piece on either side.
    is_piece = shape.bytes == shape.width
    # Short pieces are slow by DMA, and short pages by any way but the kernel.
    if way == "kernel":
        return How.KERNEL, How.KERNEL
    if is_piece and shape.bytes >= MIN_DMA_BYTES:
        return How.DIRECT, How.DIRECT
    page_bytes = len(steps) * shape.bytes
    # A page of all layers is one piece of host memory.
    end = max(steps) + sum((count - 1) * step for count, step, _ in (shape.outer, shape.inner))
    is_block = shape.pitches[0] == page_bytes and min(steps) == 0
    is_block = is_block and end + shape.width <= page_bytes
    # Adjacent layers of a page are one piece of host memory, too.
    has_runs = is_block and is_piece
    has_runs = has_runs and list(steps) == [layer * shape.bytes for layer in range(len(steps))]
    if way == "dma":
        alone = How.DIRECT if is_piece else How.KERNEL
        return How.STAGED if is_block else alone, How.STAGED if has_runs else alone
    is_block = is_block and page_bytes >= MIN_DMA_BYTES
    has_runs = has_runs and shape.bytes * load_group(shape.bytes, len(steps)) >= MIN_DMA_BYTES
    return How.STAGED if is_block else How.KERNEL, How.STAGED if has_runs else How.KERNEL


def load_group(layer_bytes: int, layer_num: int) -> int:
    """Layers that a load by DMA copies together: as many as make a long piece, or an eighth."""
    return min(-(-MIN_DMA_BYTES // layer_bytes), -(-layer_num // LOAD_GROUPS))
