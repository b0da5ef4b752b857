"""Leak check: threads, descriptors and child processes that are there before and after."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class OpenResources:
    """Threads, descriptors and children of this process."""

    threads: dict[int, str]
    """Names by identifier."""
    descriptors: dict[int, str]
    """Targets by number."""
    children: dict[int, str]
    """Names by process id; of those that have ended, and are not reaped, too."""

    @classmethod
    def now(cls) -> Self:
        """Look now, after what is garbage has been collected."""
        gc.collect()
        threads = {
            thread.ident: thread.name
            for thread in threading.enumerate()
            if thread.ident is not None
        }
        descriptors = dict[int, str]()
        for entry in Path("/proc/self/fd").iterdir():
            try:
                descriptors[int(entry.name)] = str(entry.readlink())
            except FileNotFoundError:
                # The descriptor that lists the directory.
                continue
        return cls(threads, descriptors, _children())

    def beyond(self, before: OpenResources) -> str:
        """Describe resources that were not open before; empty if there are none."""
        words = [
            f"thread {name!r}"
            for ident, name in self.threads.items()
            if ident not in before.threads
        ]
        words += [
            f"descriptor {number} ({target.replace(os.getcwd(), '.')})"
            for number, target in self.descriptors.items()
            # The target too: a number that was closed and given out again is another descriptor.
            if before.descriptors.get(number) != target
        ]
        words += [
            f"child process {number} ({name})"
            for number, name in self.children.items()
            if number not in before.children
        ]
        return ", ".join(words)


def _children() -> dict[int, str]:
    children = dict[int, str]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # `pid (name) state ppid ...`, where the name may hold blanks and parentheses.
            name, _, fields = entry.read_text().partition(" (")[2].rpartition(") ")
        except OSError:
            continue
        if fields.split()[1] == str(os.getpid()):
            children[int(entry.parent.name)] = name
    return children
