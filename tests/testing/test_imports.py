"""Test support needs no test runner, and imports torch only where it is used."""

from __future__ import annotations

import subprocess
import sys


def test_no_test_runner_is_imported():
    program = "import sys, hicache_storage.testing; print(*{'pytest', 'hypothesis', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []
