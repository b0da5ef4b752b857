"""Runs of the suite on drivers of other interfaces, and on samples with that interface."""

from __future__ import annotations

import os
import subprocess
from functools import cached_property
from pathlib import Path

from tests.conformance.conftest import Ran
from tests.support.commands import HICACHE

TESTS = Path(__file__).parents[1]
SAMPLES = {
    "sglang": TESTS / "interop" / "samples",
    "vllm-tier": TESTS / "interop_vllm" / "samples",
    "lmcache-l2": TESTS / "interop_vllm" / "samples",
}
"""Directories of the samples, by interface."""


class SuiteRun:
    """`hicache conformance run`, begun at once."""

    def __init__(self, report: Path, interface: str, driver: str, *arguments: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
        }
        options = ("--interface", interface, "--profile", "smoke", "--seed", "11")
        self.report = report
        self.process = subprocess.Popen(
            [HICACHE, "conformance", "run", driver, *options, *arguments, "--report", report],
            cwd=SAMPLES[interface],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @cached_property
    def ran(self) -> Ran:
        """The run, once it has ended."""
        output, _ = self.process.communicate(timeout=800)
        return Ran(self.process.returncode, output, self.report)

    def broken_rules(self, *cases: str) -> dict[str, str]:
        """By case the rule that it found broken; empty where it passed, or another outcome."""
        return {
            name: case["broken_rule"] or case["outcome"].replace("pass", "")
            for name, case in self.ran.cases.items()
            if name in cases
        }

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.communicate()


def of_cases(*names: str) -> tuple[str, ...]:
    """Arguments that choose some cases."""
    return tuple(part for name in names for part in ("--case", name))
