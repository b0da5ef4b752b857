"""Page checker of `hicache metadata fsck --files`: compares listed pages with the slot files.

The metadata server finds this module by its name (`hicache_metadata_server.cli.page_checks`),
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
    from hicache_metadata_server.protocol import ScopeGeometry

# Reads of a network file system wait rather than compute: several at once hide each other's
# latency, and so few do not take the engines' bandwidth.
THREADS: Final = 8


class SlotFilePageChecker:
    """Compares pages with slot files, at most `THREADS` of them at once.

    Implements `hicache_metadata_server.cli.page_checks.PageChecker`.

    Raises:
        OSError: the path is no directory of the driver.
    """

    def __init__(self, path: Path) -> None:
        self._directory = SlotFileSet(str(path))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fsck")
        self._files: dict[str, CheckedFile | None] = {}

    def open_scope(self, geometry: ScopeGeometry) -> bool:
        """Select the file of a scope; return False for a scope of another directory."""
        # A directory may have thousands of scopes: only one file is open at a time. A file that a
        # later check of an earlier scope needs is opened again.
        self._close_files()
        file = self._directory.file_of(geometry)
        self._files[geometry.scope] = file
        return file is not None

    def check_pages(
        self,
        scope: str,
        slots: Sequence[int],
        keys: Sequence[str],
        lengths: Sequence[int],
        checksums: Sequence[int],
    ) -> list[SlotVerdict]:
        """Return one verdict for each page of a scope for which `open_scope` returned True."""
        file = self._files[scope]
        assert file is not None, "a scope of another directory"
        expected = map(ExpectedPage, slots, keys, lengths, checksums)
        return list(self._threads.map(file.verdict, expected))

    def close(self) -> None:
        """Stop the threads and close the files."""
        # Threads first: a check that is still running would open its file again.
        self._threads.shutdown(cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            if file is not None:
                file.close()
