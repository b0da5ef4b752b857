"""Preflight check: memory and disk space for a sweep, before the first page is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_storage.plugins import config_model, registry
from hicache_storage.spec import parse_bytes, parse_config
from hicache_storage.tools.bench.settings import MIN_PAGE_BYTES
from hicache_storage.tools.options import directories, nearest_directory, size_text

if TYPE_CHECKING:
    from hicache_storage.hookspecs import DriverSpec
    from hicache_storage.tools.bench.settings import BenchWorkload, Sweep

HEADROOM: Final = 1.25
"""Factor for indexes of drivers, and for space of deleted pages that is not free yet."""


class InsufficientSpaceError(Exception):
    """The sweep does not fit; the message names a smaller one."""


def check_space(sweep: Sweep) -> None:
    """Check host memory, free disk space, and capacity of the driver.

    Raises:
        InsufficientSpaceError: memory, disk space or the capacity does not suffice.
        DriverError: the driver is unknown, or refuses its options.
    """
    for workload in sweep.workloads:
        _check_workload(workload, sweep.max_stored_bytes)
    # Each client writes from one batch of pages and reads into another.
    memory = max(2 * workload.clients * workload.batch_bytes for workload in sweep.workloads)
    places = directories(_checked_options(sweep)).values()
    if places:
        place, needed = nearest_directory(next(iter(places))), HEADROOM * sweep.max_stored_bytes
        check_free(place, int(needed), "a smaller --max-stored")
    else:
        # A driver whose options name no directory may keep its pages in memory.
        memory += sweep.max_stored_bytes
    available = _available_memory()
    if memory > 0.8 * available:
        raise InsufficientSpaceError(
            f"{size_text(memory)} of memory may be needed and {size_text(available)} is available; give a "
            "smaller --concurrency, smaller --pages, or a smaller --max-stored"
        )


def check_free(place: Path, needed: int, advice: str) -> None:
    """Check the free space of a file system.

    Raises:
        InsufficientSpaceError: fewer than `needed` bytes are free; the message gives the advice.
    """
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InsufficientSpaceError(
            f"{place} has {size_text(free)} free and {size_text(needed)} may be needed; give "
            f"{advice}"
        )


def check_deletes(spec: DriverSpec) -> None:
    """Check that a driver can remove the pages of a measurement.

    Raises:
        InsufficientSpaceError: it cannot.
    """
    if not spec.capabilities.deletes:
        raise InsufficientSpaceError(
            f"driver {spec.name!r} does not declare the capability 'deletes': its pages would stay"
        )


def _check_workload(workload: BenchWorkload, space: int) -> None:
    if workload.page_bytes < MIN_PAGE_BYTES or workload.page_bytes % MIN_PAGE_BYTES:
        raise InsufficientSpaceError(
            f"pages of {workload.page_bytes} bytes cannot be measured; give multiples of "
            f"{MIN_PAGE_BYTES}"
        )
    required = workload.clients * workload.batch_bytes
    if required > space:
        raise InsufficientSpaceError(
            f"{workload.clients} clients with {workload.batch_pages} pages of "
            f"{workload.page_bytes} bytes store {size_text(required)} at a time, more than "
            f"--max-stored {size_text(space)}"
        )


def _checked_options(sweep: Sweep) -> dict[str, object]:
    spec = registry().get(sweep.candidate.driver)
    model = config_model(spec)
    config = parse_config(model, sweep.candidate.options)
    options = {name: getattr(config, name) for name in model.__struct_fields__}
    check_deletes(spec)
    capacity, needed = options.get(spec.capacity_option), int(HEADROOM * sweep.max_stored_bytes)
    if isinstance(capacity, (int, str)) and parse_bytes(capacity) < needed:
        raise InsufficientSpaceError(
            f"driver {spec.name!r} would evict pages before they are read: its "
            f"{spec.capacity_option} is {capacity}, and {size_text(needed)} may be needed; give a "
            "smaller --max-stored"
        )
    return options


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
