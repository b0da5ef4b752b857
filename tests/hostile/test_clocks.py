"""Nodes whose clocks are a year apart, each a process with a clock of its own, on one store with a
capacity."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(180)]

YEAR_SECONDS = 365 * 24 * 3600

NODE = """
import sys, time
offset, path = int(sys.argv[1]), sys.argv[2]
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: real() + offset, lambda: real_ns() + offset * 1_000_000_000
from pathlib import Path
from tests.backends.file.harness import Rig, chain
rig = Rig(Path(path), capacity="1MiB")
for line in sys.stdin:
    verb, name, count = line.split()
    batches = [chain(f"{name}{number}", 4) for number in range(int(count))]
    if verb == "put":
        print(sum(sum(rig.put(batch)) for batch in batches), flush=True)
    else:
        print(sum(rig.hit(batch) for batch in batches), flush=True)
rig.storage.close()
"""


class Node:
    def __init__(self, path, offset_seconds):
        command = [sys.executable, "-c", NODE, str(offset_seconds), str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.mark.parametrize(
    ("skew", "offset"), [("ahead", YEAR_SECONDS), ("right", 0), ("behind", -YEAR_SECONDS)]
)
def test_the_clock_of_one_node_decides_nothing(tmp_path, skew, offset):
    """30 batches of one node, then 40 of the other: room is for about 60."""
    for first, second in ((offset, 0), (0, offset)):
        one, other = (
            Node(tmp_path / f"{first}-{second}", first),
            Node(tmp_path / f"{first}-{second}", second),
        )
        try:
            stored = one.ask("put", "old", 30), other.ask("put", "new", 40)
            left = other.ask("hit", "old", 30), other.ask("hit", "new", 40)
        finally:
            for node in (one, other):
                node.process.stdin.close()
                node.process.wait(30)
                node.process.stdout.close()
        whose = "the first" if first else "the second"
        print(
            f"\nclock of {whose} node {skew}: stored {stored}, left {left[0]} old and {left[1]} "
            f"new pages"
        )
        assert stored == (120, 160)
        assert left[1] == 160
        assert left[0] < 120
