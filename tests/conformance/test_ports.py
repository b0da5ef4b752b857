"""Ports for servers that a test starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache_conformance.harness import ports

CHOOSES = """
import sys
from hicache_conformance.harness import ports
if len(sys.argv) > 2:
    ports._FIRST, ports._LAST = map(int, sys.argv[2:])
print(*ports.free_ports(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_a_port_is_chosen_once_by_all_processes(monkeypatch):
    chooses = [sys.executable, "-c", CHOOSES]
    found = subprocess.run(
        [*chooses, "4"], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    first = int(found.stdout.split()[0])
    with subprocess.Popen(
        [*chooses, "2", str(first), str(first + 3)],
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
