"""Page checker of `hicache metadata fsck --files`: compares listed pages with the slot files.

The metadata server finds this module by its name (`hicache_metadata_server.cli.fsck`),
so that only a command that reads data files needs the driver.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.slots.checking import ExpectedPage, SlotFileSet, SlotVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_backends.hf3fs.slots.checking import CheckedFile
    from hicache_metadata_server.protocol import ScopeGeometry, SlotStatus

# Reads of a network file system wait rather than compute: several at once hide each other's
# latency, and so few do not take the engines' bandwidth.
THREADS: Final = 8


class SlotFilePageChecker:
    """Compares pages with slot files, at most `THREADS` of them at once.

    Implements `hicache_metadata_server.cli.fsck.PageChecker`.

    Raises:
        OSError: the path is no directory of the driver.
    """

    def __init__(self, path: Path) -> None:
        self._directory = SlotFileSet(str(path))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fsck")
        self._file: CheckedFile | None = None

    def open_scope(self, geometry: ScopeGeometry) -> bool:
        """Select the file of a scope; return False for a scope of another directory."""
        # A directory may have thousands of scopes: only one file is open at a time.
        self._close_file()
        self._file = self._directory.file_of(geometry)
        return self._file is not None

    def check_pages(self, pages: Sequence[SlotStatus]) -> list[SlotVerdict]:
        """Return one verdict for each page of the scope that was opened last."""
        assert self._file is not None, "a scope of another directory"
        expected = (ExpectedPage(page.slot, page.key, page.length, page.checksum) for page in pages)
        return list(self._threads.map(self._file.verdict, expected))

    def close(self) -> None:
        """Stop the threads and close the file."""
        # Threads first: a check that is still running would open its file again.
        self._threads.shutdown(cancel_futures=True)
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
