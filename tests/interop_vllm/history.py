"""Histories of real engines: what the driver in `recording/` wrote down, for the suite's checker."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.history.events import Begun, Call, Ended, Event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.interop_vllm.stores import Store

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
        {**json.loads(line), "process": file.stem}
        for file in log.glob("*.jsonl")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def events_of(lines: Iterable[dict[str, object]]) -> list[Event]:
    """Events of single pages, whose value stands for a digest; sets of equal bytes have the same.

    The pool of an event is the namespace, so that a page that another engine had set under the
    same key is another page.
    """
    lines = list(lines)
    values = defaultdict[tuple[str, str], dict[str, int]](dict)
    ends = dict[tuple[object, ...], dict[str, object]]()
    for line in lines:
        if line["call"] == "set" and line["ended"] is not None:
            ends[_set_of(line)] = line
        elif line["call"] == "set":
            for key, digest in zip(line["keys"], line["wrote"], strict=True):
                page = values[line["namespace"], key]
                page.setdefault(digest, len(page) + 1)
    numbers = itertools.count()
    events = list[Event]()
    for line in lines:
        if line["call"] == "set" and line["ended"] is not None:
            continue
        end = ends.get(_set_of(line)) if line["call"] == "set" else line
        for index, key in enumerate(line["keys"]):
            page = values[line["namespace"], key]
            number = next(numbers)
            # Clients of their own: calls of an engine's threads overlap.
            begun = Begun(
                number=number,
                client=str(number),
                call=Call(line["call"]),
                at=line["begun"],
                pool=line["namespace"],
                keys=(key,),
                value=page[line["wrote"][index]] if line["call"] == "set" else 0,
            )
            ended = None
            if end is not None and line["call"] == "set":
                ended = Ended(number=number, at=end["ended"], done=(end["done"][index],))
            elif end is not None:
                digest = line["found"][index]
                # A digest that nobody has set under this page is the bytes of no value.
                found = None if digest is None else page.get(digest, bytes.fromhex(digest))
                ended = Ended(number=number, at=end["ended"], found=(found,))
            events.append(Event(begun, ended))
    return events


def _set_of(line: dict[str, object]) -> tuple[object, ...]:
    return line["process"], line["namespace"], line["number"]
