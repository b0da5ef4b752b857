"""Says at the end of a run which blocks of the documentation were not run, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The same on a worker's controller as in one process: the pages are read again."""
    ran = (report for reports in terminalreporter.stats.values() for report in reports)
    if not any("test_every_block" in getattr(report, "nodeid", "") for report in ran):
        return
    from pages import not_run, pages

    found = [block for page in pages() for block in not_run(page)]
    terminalreporter.section(f"{len(found)} blocks of the documentation are not run")
    for block in found:
        terminalreporter.write_line(f"{block}: {block.reason}")
