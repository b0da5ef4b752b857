"""Whether there is room for a sweep: asked before the first page is written."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_storage.plugins import config_model, registry
from hicache_storage.spec import parse_bytes, parse_config
from hicache_storage.tools.bench.settings import MIN_PAGE_BYTES
from hicache_storage.tools.options import directories, nearest_directory

if TYPE_CHECKING:
    from hicache_storage.tools.bench.settings import Cell, Contender, Sweep

HEADROOM: Final = 1.25
"""Drivers keep indexes, and room that deleted pages have left."""


class NoRoomError(Exception):
    """The sweep does not fit; the message says what would."""


def check_room(sweep: Sweep) -> None:
    """Add up host memory, directories and capacities.

    Raises:
        NoRoomError: something does not suffice.
        DriverError: a driver is unknown, or refuses its options.
    """
    for cell in sweep.cells:
        _check_cell(cell, sweep.space_bytes)
    memory = len(sweep.contenders) * max(cell.pool_bytes for cell in sweep.cells)
    disks = defaultdict[int, int](int)
    places = dict[int, Path]()
    for contender in sweep.contenders:
        options = _check_contender(contender, sweep)
        found = [nearest_directory(path) for path in directories(options).values()]
        for place in found[:1]:
            device = place.stat().st_dev
            disks[device] += int(HEADROOM * sweep.space_bytes)
            places[device] = place
        if not found:
            memory += sweep.space_bytes
    for device, needed in disks.items():
        free = shutil.disk_usage(places[device]).free
        if needed > free:
            raise NoRoomError(f"{places[device]} has {_gib(free)} free and {_gib(needed)} may be needed; give a smaller --space")
    available = _available_memory()
    if memory > 0.8 * available:
        raise NoRoomError(
            f"{_gib(memory)} of memory may be needed and {_gib(available)} is available; give fewer --lanes, smaller --pages, "
            "or a smaller --space"
        )


def _check_cell(cell: Cell, space: int) -> None:
    if cell.page_bytes < MIN_PAGE_BYTES or cell.page_bytes % MIN_PAGE_BYTES:
        raise NoRoomError(f"pages of {cell.page_bytes} bytes cannot be made; give multiples of {MIN_PAGE_BYTES}")
    least = cell.lanes * cell.batch_bytes
    if least > space:
        raise NoRoomError(
            f"{cell.lanes} lanes with {cell.batch_pages} pages of {cell.page_bytes} bytes store {_gib(least)} at a time, more than "
            f"--space {_gib(space)}"
        )


def _check_contender(contender: Contender, sweep: Sweep) -> dict[str, object]:
    spec = registry().get(contender.driver)
    model = config_model(spec)
    config = parse_config(model, contender.options)
    options = {name: getattr(config, name) for name in model.__struct_fields__}
    if not (spec.capabilities.deletes or spec.capabilities.clears or sweep.keeps_pages):
        raise NoRoomError(
            f"driver {spec.name!r} can neither delete nor clear, so that its pages would stay; --keep-pages leaves them to it"
        )
    capacity = options.get(spec.capacity_option) if spec.capacity_option else None
    if isinstance(capacity, (int, str)) and parse_bytes(capacity) < HEADROOM * sweep.space_bytes:
        raise NoRoomError(
            f"driver {spec.name!r} would evict pages before they are read: its {spec.capacity_option} is {capacity}, and "
            f"{_gib(HEADROOM * sweep.space_bytes)} may be needed; give a smaller --space"
        )
    return options


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.2g} GiB"
