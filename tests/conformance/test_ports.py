"""Ports for servers that a test starts."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from hicache_conformance.harness import ports

CHOOSES = """
import sys
from hicache_conformance.harness import ports
ports._FIRST, ports._LAST = map(int, sys.argv[1:])
print(*ports.free_ports(2), flush=True)
sys.stdin.read()
"""


def test_a_port_is_chosen_once_by_all_processes(monkeypatch):
    # Where no other test chooses.
    first = random.randrange(10_000, 14_000)
    with subprocess.Popen(
        [sys.executable, "-c", CHOOSES, str(first), str(first + 3)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        chosen = [int(port) for port in other.stdout.readline().split()]
        monkeypatch.setattr(ports, "_FIRST", first)
        monkeypatch.setattr(ports, "_LAST", first + 3)
        # One after the other: the other process may have those in the middle.
        here = [port for _ in range(2) for port in ports.free_ports(1)]
        assert sorted(here + chosen) == list(range(first, first + 4))
        with pytest.raises(OSError, match="no 1 free ports"):
            ports.free_ports(1)
        other.stdin.close()
        assert other.wait(timeout=30) == 0
    assert ports.free_ports(2) == chosen
