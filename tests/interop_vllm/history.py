"""Histories of real engines: what the driver in `recording/` wrote down."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.interop.stores import Store

RECORDING = Path(__file__).parent / "recording"


def install(site: Path) -> str:
    """Make the recording driver count as installed; return the `PYTHONPATH` that does it."""
    metadata = site / "hicache_recording-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hicache-recording\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[hicache_storage.drivers]\nrecording = recording_driver\n"
    )
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(site), str(RECORDING), *filter(None, [inherited])])


def recorded(store: Store, log: Path) -> dict[str, object]:
    """Options of the recording driver around the driver of a store, with a log of its own."""
    log.mkdir()
    return {"inner": store.driver, "options": store.options, "log": str(log)}


def lines_of(log: Path) -> list[dict[str, object]]:
    """What the processes of an engine have recorded; without a line that is being written."""
    return [
        json.loads(line)
        for file in log.glob("*.jsonl")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def wrong_pages(lines: Iterable[dict[str, object]]) -> list[tuple[str, str]]:
    """Keys and digests of pages that were delivered and that nobody had begun to set as those.

    A namespace is a part of a page's name, so that a page of another engine under the same key is
    another page.
    """
    lines, begun = list(lines), dict[tuple[str, str, str], int]()
    for line in lines:
        if line["call"] == "set":
            for key, digest in zip(line["keys"], line["digests"], strict=True):
                page = line["namespace"], key, digest
                begun[page] = min(line["begun"], begun.get(page, line["begun"]))
    return [
        (key, digest)
        for line in lines
        if line["call"] == "get"
        for key, digest in zip(line["keys"], line["digests"], strict=True)
        if digest and begun.get((line["namespace"], key, digest), math.inf) > line["ended"]
    ]
