"""Scripts that show what docs/matrix.md says about drivers of others, with the drivers alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hicache_conformance.interfaces.interface import known

ROOT = Path(__file__).parents[2]


def scripts(*interfaces: str) -> list[str]:
    """The drivers of some interfaces that have a script."""
    return [
        name
        for interface in interfaces
        for name, setup in known(interface).items()
        if setup.reproductions
    ]


def reproduce(command: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run a script; what it has printed about each of its rules."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    lines = (line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
    return ran, {rule: text for rule, text in lines if re.fullmatch(r"[A-Z]+-\d+", rule)}


def failing_rules(driver: str) -> set[str]:
    """The rules that the matrix says a driver breaks."""
    text = (ROOT / "docs" / "matrix.md").read_text()
    _, _, section = text.partition(f"\n### {driver}\n")
    return set(re.findall(r"^- \*\*(\S+)\*\*", section.partition("\n##")[0], re.MULTILINE))
