"""Peak memory of a call, beyond the memory that it keeps."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def transient_bytes(calls: Iterable[Callable[[], object]]) -> int:
    """The least that any of the calls needed beyond what it found and left behind.

    Python's own memory is traced to the byte. Memory from elsewhere, such as tensors and mappings,
    shows in the pages that the process touches.
    """
    needs = list[int]()
    gc.collect()
    tracemalloc.start()
    try:
        for call in calls:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            # Where the kernel does not let us, the peak since the process began hides this part; the
            # traced part remains.
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")
            resident = _status("VmRSS:")
            call()
            resident_peak, resident_after = _status("VmHWM:"), _status("VmRSS:")
            after, peak = tracemalloc.get_traced_memory()
            needs.append(
                max(peak - max(before, after), resident_peak - max(resident, resident_after))
            )
    finally:
        tracemalloc.stop()
    # The least, because a buffer that grows once, or a library's cache, is needed in the first
    # calls only.
    return max(0, min(needs))


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
